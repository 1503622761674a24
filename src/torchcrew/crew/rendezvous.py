"""A meeting place for the ranks of one `spawn`: `init_process_group` without an address, and without a port.

    parent                                     rank i
    Rendezvous                                 attend(): lock on byte i of `presence`; the "env" handler is ours
      store     memfd ── inherited ──────────►   init_process_group(backend, rank=…, world_size=…)
      presence  memfd ── inherited ──────────►     │ MASTER_ADDR or MASTER_PORT is set: stock's handler, untouched
    closes its copies when all have started        └ else: FileStore on the memfd, below a prefix of this meeting;
                                                      wait until all have arrived

Owner      the kernel frees both memfds with the last rank. No name, no port, nothing that another program could use;
           two spawns at a time have two stores.
Death      a rank's lock goes with it. Who waits for ranks that are gone without having arrived gets an error at once,
           where stock waits for the timeout of the process group (half an hour). Ranks that fail are `spawn`'s matter,
           which ends the others.
"""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing import reduction
from typing import Any
from urllib.parse import parse_qsl, urlparse

import torch.distributed

from torchcrew import torch_private
from torchcrew.crew.rank import Rank
from torchcrew.memory import byte_locks

__all__ = ("Rendezvous",)

#: How often a rank looks whether the others have arrived, in seconds.
POLL = 0.005
#: How long every process of a spawn must be seen waiting before that is an error, in seconds: one that has just been
#: released may need a moment to say so.
STUCK_TIMEOUT = 5.0
#: Stock's, for what calls the handler without one.
DEFAULT_TIMEOUT = timedelta(minutes=30)
#: What torch reads when it makes a group. The interface: gloo's ports shall be seen from this machine only. The
#: barrier: without it a rank that is done at once closes connections that others are still making, and those fail.
_VARIABLES = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DIST_INIT_BARRIER": "1"}

Answer = tuple[Any, int, int]

#: The last groups of this rank, also when they were destroyed. Gloo's destructor waits for a thread that may need the
#: interpreter's lock to let go of its last operation. Run by whoever holds that lock, as by the end of the function in
#: which a `DistributedDataParallel` was the last to have the group, it waits for ever. One that has seen others come
#: and go has no operation left; the process itself ends without destructors.
_groups: collections.deque[Any] = collections.deque(maxlen=8)


class Rendezvous:
    """The meeting place; travels to the ranks with their arguments."""

    def __init__(self) -> None:
        """Make it, in the parent."""
        self.store = os.memfd_create("torchcrew-rendezvous")
        try:
            self.presence = os.memfd_create("torchcrew-presence")
        except BaseException:
            os.close(self.store)
            raise

    def __reduce__(self) -> Any:
        return _arrive, (reduction.DupFd(self.store), reduction.DupFd(self.presence))

    def close(self) -> None:
        """Close the parent's copies; the ranks have theirs."""
        os.close(self.store)
        os.close(self.presence)

    def attend(self, rank: Rank) -> None:
        """Be this rank from now on, and answer `init_process_group` where the user gave no address."""
        presence = _Presence(self.presence, rank)
        if torch.distributed.is_available():
            handlers = torch_private.rendezvous_handlers()
            handlers["env"] = _Handler(handlers["env"], self.store, presence)
            torch_private.keep_process_groups(_groups.append)


def _arrive(store: Any, presence: Any) -> Rendezvous:
    """Unpickle one, in a rank."""
    rendezvous = Rendezvous.__new__(Rendezvous)
    rendezvous.store, rendezvous.presence = store.detach(), presence.detach()
    for fd in (rendezvous.store, rendezvous.presence):
        os.set_inheritable(fd, False)  # descriptors arrive without
    return rendezvous


class _Presence:
    """Which ranks have started, and which of those still live: a byte and a lock for each."""

    def __init__(self, shared: int, rank: Rank) -> None:
        self.rank = rank
        # Opened anew: such a lock belongs to an open file, and the inherited one is the same in all ranks. It stays
        # open to the end; what this rank forks shares it, and keeps this rank's place.
        self.fd = byte_locks.reopen(shared)
        if not byte_locks.lock(self.fd, rank.index):
            raise BlockingIOError(f"another process is rank {rank.index} of this spawn")
        os.pwrite(self.fd, b"\1", rank.index)

    def gone(self) -> list[int]:
        """The ranks that had started and have ended."""
        started = os.pread(self.fd, self.rank.count, 0)
        return [index for index, flag in enumerate(started) if flag and not self._is_locked(index)]

    def _is_locked(self, index: int) -> bool:
        # What is locked by ourselves, the kernel does not report.
        return index == self.rank.index or byte_locks.is_locked(self.fd, index)


class _Handler:
    """What torch asks for a store, a rank and a size where the program says ``env://``, or nothing."""

    def __init__(self, stock: Any, store: int, presence: _Presence) -> None:
        self.stock = stock
        self.path = f"/proc/self/fd/{store}"
        self.presence = presence
        self.rank = presence.rank
        self.dist: Any = torch.distributed  # its type hints leave out the stores
        self.variables: set[str] = set()  # that we have set

    def __call__(self, url: str, **options: Any) -> Iterator[Answer]:
        """Answer as torch's own handler does: yield the triplet, once."""
        rank, size = self.asked(url)
        if os.environ.get("MASTER_ADDR") or os.environ.get("MASTER_PORT") or not self.could_meet(rank, size):
            for name in self.variables:  # ours must not keep the user's group on this machine
                os.environ.pop(name, None)
            self.variables.clear()
            yield from self.stock(url, **options)
            return
        for name, value in _VARIABLES.items():
            if name not in os.environ:
                os.environ[name] = value
                self.variables.add(name)
        yield self.meet(rank, size, options.get("timeout") or DEFAULT_TIMEOUT), rank, size
        raise RuntimeError("the ranks of a spawn cannot meet a second time by the same rendezvous")

    def asked(self, url: str) -> tuple[int, int]:
        """Rank and size as given, else as in the environment, else those of the spawn."""
        query = dict(parse_qsl(urlparse(url).query))
        rank = query.get("rank") or os.environ.get("RANK") or self.rank.index
        size = query.get("world_size") or os.environ.get("WORLD_SIZE") or self.rank.count
        return int(rank), int(size)

    def could_meet(self, rank: int, size: int) -> bool:
        """Whether the ranks of this spawn suffice. Else the program means several hosts, and lacks their address."""
        return rank >= 0 and (size == -1 or rank < size <= self.rank.count)

    def meet(self, rank: int, size: int, timeout: timedelta) -> Any:
        """The store of this meeting, once all are there.

        The n-th process that comes as a rank of a group of some size takes part in the n-th meeting of that size:
        groups can follow each other, and have different members.

        Raises:
            RuntimeError: nobody is left who could come, or none came in time; torch's `DistStoreError`.
        """
        base = self.dist.FileStore(self.path, -1)
        meeting = base.add(f"{size}/rank/{rank}", 1)
        store = self.dist.PrefixStore(f"{size}/{meeting}", base)
        store.set(f"process/{self.rank.index}", "")
        store.add("arrived", 1)
        base.set(f"waiting/{self.rank.index}", "1")
        try:
            self.wait(base, store, rank, size, timeout.total_seconds())
        finally:
            base.set(f"waiting/{self.rank.index}", "0")
        return store

    def wait(self, base: Any, store: Any, rank: int, size: int, timeout: float) -> None:
        """Wait until as many have come as the group is large."""
        begun = time.monotonic()
        stuck = 0.0
        while True:
            gone = self.presence.gone()  # before the count: who is gone and has come is counted
            arrived = store.add("arrived", 0)
            if arrived >= size:
                return
            now = time.monotonic()
            lost = [index for index in gone if not store.check([f"process/{index}"])]
            if self.rank.count - len(lost) < size:
                raise _error(f"process {lost[0]} of this spawn ended without calling init_process_group", rank, size)
            if now > begun + timeout:
                raise _error(f"only {arrived} came in {timeout:g} s", rank, size)
            stuck = (stuck or now) if self.all_wait(base, gone) else 0.0
            if stuck and now > stuck + STUCK_TIMEOUT:
                raise _error(f"only {arrived} came and all others wait, too: is each rank given once?", rank, size)
            time.sleep(POLL)

    def all_wait(self, base: Any, gone: list[int]) -> bool:
        """Whether every process of the spawn that lives waits for others."""
        keys = [f"waiting/{index}" for index in range(self.rank.count) if index not in gone]
        return base.check(keys) and all(base.get(key) == b"1" for key in keys)


def _error(text: str, rank: int, size: int) -> Exception:
    """The error that torch's own stores raise where peers stay away."""
    kind: type[Exception] = getattr(torch.distributed, "DistStoreError", RuntimeError)
    return kind(f"rank {rank} waits for a group of {size}, but {text}")
