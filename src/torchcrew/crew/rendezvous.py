"""A meeting place for the ranks of one `spawn` or `launch`: `init_process_group` without a port.

    parent                                     rank i
    Rendezvous                                 attend(): lock on byte i of `presence`; the "env" handler is ours
      store     memfd ── inherited ──────────►   init_process_group(backend, rank=…, world_size=…)
      presence  memfd ── inherited ──────────►     │ the user's MASTER_ADDR or MASTER_PORT: stock's handler, untouched
    closes its copies when all have started        └ else: FileStore on the memfd, below a prefix of this meeting;
                                                      wait until all have arrived

    ranks of several hosts, or of another launcher: attend_at(address): stock's store at that address, below a prefix of
    each meeting. Without it a second group finds what the first has left there.

Owner      the kernel frees both memfds with the last rank. No name, no port, nothing that another program could use;
           two spawns at a time have two stores.
Death      a rank's lock goes with it. Who waits for ranks that are gone without having arrived gets an error at once,
           where stock waits for the timeout of the process group (half an hour). Ranks that fail are `spawn`'s matter,
           which ends the others.
"""

from __future__ import annotations

import collections
import ctypes
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import reduction
from typing import Any
from urllib.parse import parse_qsl, urlparse

import torch.distributed

from torchcrew import torch_private
from torchcrew.crew.rank import Rank
from torchcrew.memory import byte_locks

__all__ = ("Rendezvous", "attend_at", "is_loopback", "keep_groups_for_ever", "same_address")

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
_stop_keeping: Callable[[], None] | None = None


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

    def attend(self, rank: Rank, address: tuple[str, int] | None = None) -> Callable[[], None]:
        """Be this rank from now on, and answer `init_process_group` where the user gave no address.

        Args:
            rank: which one.
            address: what MASTER_ADDR and MASTER_PORT may say without being an address of the user's.

        Returns:
            A function that gives up this place, for tests.
        """
        presence = _Presence(self.presence, rank)
        restore = _answer_with(lambda stock: _Handler(stock, address, self.store, presence))

        def leave() -> None:
            restore()
            os.close(presence.fd)

        return leave


def attend_at(address: tuple[str, int]) -> Callable[[], None]:
    """Answer `init_process_group` by stock's store at this address, with room of its own for each meeting.

    All ranks of the job have to do so. Where the environment says another address when a group is made, the answer is
    stock's alone.

    Args:
        address: what MASTER_ADDR and MASTER_PORT say.

    Returns:
        A function that undoes it, for tests.
    """
    return _answer_with(lambda stock: _HandlerAtAddress(stock, address))


def keep_groups_for_ever() -> None:
    """Have the groups of this process outlive the interpreter that ends: their destructors could wait for its lock."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_groups))


def is_loopback(host: str) -> bool:
    """Whether a host name means this machine whatever its network is."""
    return host == "localhost" or host.startswith("127.")


def same_address(host: str | None, port: str | None, address: tuple[str, int] | None) -> bool:
    """Whether a host and a port, as the environment has them, are that address."""
    if address is None or not host or port is None or port.strip() != str(address[1]):
        return False
    return host == address[0] or (is_loopback(host) and is_loopback(address[0]))


def _answer_with(handler: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace torch's handler of ``env://``; the result puts it back."""
    global _stop_keeping
    if not torch.distributed.is_available():
        return lambda: None
    handlers = torch_private.rendezvous_handlers()
    stock = handlers["env"]
    ours = handlers["env"] = handler(stock)
    keeps = _stop_keeping is None
    if keeps:
        _stop_keeping = torch_private.keep_process_groups(_groups.append)

    def restore() -> None:
        global _stop_keeping
        if handlers["env"] is ours:
            handlers["env"] = stock
        if keeps and _stop_keeping is not None:
            _stop_keeping()
            _stop_keeping = None

    return restore


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


class _Answers:
    """What torch asks for a store, a rank and a size where the program says ``env://``, or nothing."""

    #: What is set in the environment while groups are made here.
    settings = _VARIABLES

    def __init__(self, stock: Any, address: tuple[str, int] | None) -> None:
        self.stock = stock
        self.address = address
        self.dist: Any = torch.distributed  # its type hints leave out the stores
        self.variables: set[str] = set()  # that we have set

    def __call__(self, url: str, **options: Any) -> Iterator[Answer]:
        """Answer as torch's own handler does: yield the triplet, once."""
        if not self.is_ours(url):
            for name in self.variables:  # ours must not keep the user's group on this machine
                os.environ.pop(name, None)
            self.variables.clear()
            yield from self.stock(url, **options)
            return
        for name, value in self.settings.items():
            if name not in os.environ:
                os.environ[name] = value
                self.variables.add(name)
        yield self.answer(url, options)
        raise RuntimeError("the ranks cannot meet a second time by the same rendezvous")

    def is_ours(self, url: str) -> bool:
        """Whether we answer, and not stock."""
        raise NotImplementedError

    def answer(self, url: str, options: dict[str, Any]) -> Answer:
        """Store, rank and size."""
        raise NotImplementedError


class _HandlerAtAddress(_Answers):
    """By stock's store at an address that all ranks have."""

    def __init__(self, stock: Any, address: tuple[str, int]) -> None:
        super().__init__(stock, address)
        if not is_loopback(address[0]):
            self.settings = {name: value for name, value in _VARIABLES.items() if name != "GLOO_SOCKET_IFNAME"}
        self.stores: list[Any] = []  # one may have the server, which has to outlive the groups

    def is_ours(self, url: str) -> bool:
        return same_address(os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"), self.address)

    def answer(self, url: str, options: dict[str, Any]) -> Answer:
        """The n-th process that comes as a rank of a group of some size takes part in the n-th meeting of that size."""
        if not self.stores:
            self.serve_on_loopback(url, options)
        store, rank, size = next(self.stock(url, **options))
        self.stores[1:] = [store]
        # An agent's store may be the same after a restart, when not all ranks have come equally often.
        base = self.dist.PrefixStore(f"torchcrew/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        meeting = base.add(f"{size}/rank/{rank}", 1)
        return self.dist.PrefixStore(f"{size}/{meeting}", base), rank, size

    def serve_on_loopback(self, url: str, options: dict[str, Any]) -> None:
        """Have rank 0's server listen for this machine only, if nobody else needs it: stock's listens everywhere.

        Stock's own store then finds this server under its port.
        """
        assert self.address is not None
        host, port = self.address
        rank = dict(parse_qsl(urlparse(url).query)).get("rank") or os.environ.get("RANK")
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if rank != "0" or agent or not is_loopback(host) or os.environ.get("USE_LIBUV", "1") != "1":
            self.stores.append(None)
            return
        listener = socket.create_server(("127.0.0.1", port), backlog=1024)
        timeout = options.get("timeout") or DEFAULT_TIMEOUT
        server = self.dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
        self.stores.append(server)


class _Handler(_Answers):
    """By a file in memory that all ranks have inherited."""

    def __init__(self, stock: Any, address: tuple[str, int] | None, store: int, presence: _Presence) -> None:
        super().__init__(stock, address)
        self.path = f"/proc/self/fd/{store}"
        self.presence = presence
        self.rank = presence.rank

    def is_ours(self, url: str) -> bool:
        """Not where the user gave an address, or means more ranks than there are."""
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if host or port:
            return same_address(host, port, self.address)
        return self.could_meet(*self.asked(url))

    def answer(self, url: str, options: dict[str, Any]) -> Answer:
        rank, size = self.asked(url)
        if not self.could_meet(rank, size):  # the address is ours, where stock would wait for ranks that do not exist
            raise ValueError(f"rank {rank} of a group of {size}: only {self.rank.count} ranks were started")
        return self.meet(rank, size, options.get("timeout") or DEFAULT_TIMEOUT), rank, size

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
