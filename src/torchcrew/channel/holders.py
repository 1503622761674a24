"""Who else can still use a mailbox: pipes whose write ends only the others hold.

    this process                        a forked child           a spawned child
      Witness  read end ◄── write end ── inherited at the fork    sent along with the mailbox
                  └─ hangs up when that process, and all that inherited from it, are gone

The kernel closes a write end with its last holder, so grandchildren count and no pid can be mistaken for another. A
process that waits at a mailbox waits on its witnesses, too: when the last of them has hung up, nobody is left who could
put something in, or take something out.

Owner      this process owns the read ends: a `Witness` closes its own when it is forgotten. In the child the write end
           stays open until the process ends: until then it counts as a holder.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing import context, reduction
from queue import Empty
from typing import Any

__all__ = ("Deserted", "Holders", "Witness", "other_threads")

#: While other threads run, which may start processes or come to an end, a wait looks up this often, in seconds.
_LOOK_UP = 0.25
#: So many of those that are gone are remembered, for messages.
_REMEMBERED = 64
#: Threads of these modules put nothing by themselves: they move what others have put, or look after something else.
#: Some of them are in every process of their kind (a notebook's, one with a progress bar) from its start to its end.
_SERVANTS = (
    "torchcrew.channel.",
    "torchcrew.crew.",
    "torchcrew.multiprocessing.queues",
    "multiprocessing.resource_sharer",
    "torch.utils.data.",
    "tqdm.",
    "IPython.",
    "ipykernel.",
    "debugpy.",
    "_pydevd_bundle.",
)
_SERVANTS_BY_NAME = frozenset({"QueueFeederThread", "QueueManagerThread"})


class Deserted(Exception):
    """Nobody is left for whom it would make sense to wait: every other holder is gone, and no other thread runs."""


class Witness:
    """Tells whether a process that received the mailbox, or one that inherited it from there, still exists."""

    __slots__ = ("__weakref__", "pid", "read_end", "write_end")

    def __init__(self) -> None:
        self.pid = 0
        self.read_end = self.write_end = -1
        self.read_end, self.write_end = os.pipe()

    def let_go(self) -> None:
        """Close this process's copy of the write end."""
        fd, self.write_end = self.write_end, -1
        if fd >= 0:
            os.close(fd)

    def learn_pid(self) -> int:
        """The process's pid, which it has written into the pipe; 0 if it ended before."""
        if not self.pid:
            with contextlib.suppress(OSError, ValueError):
                self.pid = int(os.read(self.read_end, 20))
        return self.pid

    def __del__(self) -> None:
        self.let_go()
        if self.read_end >= 0:
            os.close(self.read_end)


class Holders:
    """The other processes that hold one mailbox, as far as they got it from this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the collector may come by while it is held
        self._witnesses: list[Witness] = []
        self._starting: list[tuple[Witness, weakref.ref[Any]]] = []
        self._news: list[int] = []
        #: Pids of holders that are gone, the first ones first; 0 for one that is not known.
        self.gone: list[int] = []
        #: Called in a wait with the pids of holders that have gone away.
        self.on_gone: Callable[[list[int]], None] = _nothing
        #: Whether this process itself has something to put into the mailbox.
        self.has_backlog: Callable[[], object] = _never
        _all.add(self)

    def watched(self) -> list[int]:
        """Descriptors that hang up when a holder goes away; those gone already are taken note of."""
        with self._lock:
            self._settle()
            if self._witnesses:
                poller = select.poll()
                for witness in self._witnesses:
                    poller.register(witness.read_end, 0)  # a hang-up is always reported
                self._note_gone({fd for fd, _ in poller.poll(0)})
            return [witness.read_end for witness in self._witnesses]

    def _note_gone(self, hung_up: set[int]) -> None:
        if hung_up:
            pids = [witness.learn_pid() for witness in self._witnesses if witness.read_end in hung_up]
            self._witnesses = [witness for witness in self._witnesses if witness.read_end not in hung_up]
            self.gone = (self.gone + pids)[-_REMEMBERED:]
            self._news = (self._news + pids)[-_REMEMBERED:]

    def deserted(self) -> bool:
        """Whether there were other holders, none is left, and nothing in this process could stand in for them."""
        return not self.watched() and self._nobody_stands_in()

    def _nobody_stands_in(self) -> bool:
        return bool(self.gone) and not (self._starting or self.has_backlog() or other_threads())

    def tell(self) -> None:
        """Report who has gone away since the last time; to be called while others are left, where it may raise."""
        news, self._news = self._news, []
        if news:
            self.on_gone(news)

    def wait(
        self, attempt: Callable[[], Any], fd: int, events: int, timeout: float | None, *, patient: bool = False
    ) -> Any:
        """Wait until ``attempt`` returns something else than None, which it may when ``fd`` has one of ``events``.

        Args:
            timeout: seconds; None: as long as it takes.
            patient: wait also where nobody is left.

        Raises:
            Empty: nothing in time.
            Deserted: without a timeout only, and after a last attempt.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise Empty
            busy = threading.active_count() > 1  # asked first: one that ends from now on is still looked up for
            watched = [] if patient else self.watched()
            if not patient:
                alone = not watched and self._nobody_stands_in()
                if alone or self._news:
                    done = attempt()  # the last thing that they did may have been a put
                    if done is not None:
                        return done
                if alone and timeout is None:
                    self._news = []  # who raises an error about it names them all
                    raise Deserted
                if not alone:
                    self.tell()
                if busy:
                    left = _LOOK_UP if left is None else min(left, _LOOK_UP)
            poller = select.poll()
            poller.register(fd, events)
            for other in watched:
                poller.register(other, 0)
            poller.poll(None if left is None else left * 1000)
            done = attempt()
            if done is not None:
                return done

    def send_along(self) -> Any:
        """For a process that is being started: what it must keep, pickled with the mailbox."""
        with contextlib.suppress(OSError), self._lock:  # no descriptor left: then it is not watched
            witness = Witness()
            self._starting.append((witness, weakref.ref(context.get_spawning_popen())))
            return reduction.DupFd(witness.write_end)
        return None

    def received(self, fd: Any) -> None:
        """In that process: keep what was sent along."""
        if fd is not None:
            _keep(fd.detach())

    def _settle(self) -> None:
        """Close our write ends of processes that have been started; until then their starter needs them."""
        for entry in list(self._starting):
            witness, reference = entry
            popen = reference()
            pid = getattr(popen, "pid", None)
            if popen is None or pid is not None:
                self._starting.remove(entry)
                witness.let_go()
                witness.pid = pid or 0
                self._witnesses.append(witness)

    def before_fork(self) -> None:
        """Close what the child must not inherit, and forget who is gone, or descriptors would run out one day."""
        self.watched()

    def add(self, witness: Witness) -> None:
        """Watch one more."""
        with self._lock:
            self._witnesses.append(witness)

    def after_fork_in_child(self) -> None:
        """Its parent's witnesses are not its own."""
        self._lock = threading.RLock()
        self._witnesses, self._starting, self._news, self.gone = [], [], [], []


def _nothing(pids: list[int]) -> None:
    """Nobody wants to know."""


def _never() -> bool:
    return False


def other_threads() -> bool:
    """Whether another thread of this process might put something."""
    if threading.active_count() == 1:
        return False
    return any(thread is not threading.current_thread() and not _is_servant(thread) for thread in threading.enumerate())


def _is_servant(thread: threading.Thread) -> bool:
    runs = getattr(thread, "_target", None) or type(thread)
    module = getattr(runs, "__module__", "") or ""
    return module.startswith(_SERVANTS) or (module.startswith("multiprocessing.") and thread.name in _SERVANTS_BY_NAME)


def _keep(write_end: int) -> None:
    """In the process that a witness is about."""
    _inherited.append(write_end)
    with contextlib.suppress(OSError):  # its parent is gone
        os.write(write_end, str(os.getpid()).encode())


_all: weakref.WeakSet[Holders] = weakref.WeakSet()
_forking = threading.local()
#: The write ends that say that this process is still there.
_inherited: list[int] = []


def _before_fork() -> None:
    _forking.witness = None
    if _all:
        for holders in list(_all):
            holders.before_fork()
        with contextlib.suppress(OSError):
            _forking.witness = Witness()


def _after_fork_in_parent() -> None:
    witness = getattr(_forking, "witness", None)
    if witness is not None:
        _forking.witness = None
        witness.let_go()
        for holders in list(_all):
            holders.add(witness)


def _after_fork_in_child() -> None:
    witness = getattr(_forking, "witness", None)
    for holders in list(_all):
        holders.after_fork_in_child()
    if witness is not None:
        _forking.witness = None
        fd, witness.write_end = witness.write_end, -1
        _keep(fd)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
