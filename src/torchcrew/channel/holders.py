"""Who else can still use a mailbox: pipes whose write ends only the others hold.

    this process                        a forked child           a spawned child
      Witness  read end ◄── write end ── inherited at the fork    sent along with the mailbox
                  └─ hangs up when that process, and all that inherited from it, are gone

The kernel closes a write end with its last holder, so grandchildren count and no pid can be mistaken for another. A
process that waits in `get` waits on its witnesses, too: when the last has hung up, nobody is left who could put.

Owner      this process owns the read ends: a `Witness` closes its own when it is forgotten. In the child the write end
           stays open until the process ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import weakref
from multiprocessing import context, reduction
from typing import Any

__all__ = ("Holders", "Witness")


class Witness:
    """Tells whether a process that received the mailbox, or one that inherited it from there, still exists."""

    __slots__ = ("__weakref__", "read_end", "write_end")

    def __init__(self) -> None:
        self.read_end = self.write_end = -1
        self.read_end, self.write_end = os.pipe()

    def let_go(self) -> None:
        """Close this process's copy of the write end."""
        fd, self.write_end = self.write_end, -1
        if fd >= 0:
            os.close(fd)

    def is_gone(self) -> bool:
        """Whether nobody holds the write end any more."""
        poller = select.poll()
        poller.register(self.read_end, 0)  # a hang-up is always reported
        return bool(poller.poll(0))

    def __del__(self) -> None:
        self.let_go()
        if self.read_end >= 0:
            os.close(self.read_end)


class Presence:
    """The write end of a witness in a process that was given it: open as long as the mailbox it came with."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __del__(self) -> None:
        os.close(self._fd)


class Holders:
    """The other processes that hold one mailbox."""

    def __init__(self) -> None:
        self._witnesses: list[Witness] = []
        self._starting: list[tuple[Witness, weakref.ref[Any]]] = []
        self.presence: Presence | None = None
        self.ever = False
        _all.add(self)

    def watched(self) -> list[int]:
        """Descriptors that hang up when a holder goes away; those gone already are forgotten."""
        self._settle()
        self._witnesses = [witness for witness in self._witnesses if not witness.is_gone()]
        return [witness.read_end for witness in self._witnesses]

    def deserted(self) -> bool:
        """Whether there were other holders, and none is left."""
        return self.ever and not self.watched() and not self._starting

    def send_along(self) -> Any:
        """For a process that is being started: what it must keep, pickled with the mailbox."""
        with contextlib.suppress(OSError):  # no descriptor left: then it is not watched
            witness = Witness()
            self._starting.append((witness, weakref.ref(context.get_spawning_popen())))
            return reduction.DupFd(witness.write_end)
        return None

    def received(self, fd: Any) -> None:
        """In that process: keep what was sent along."""
        if fd is not None:
            self.presence = Presence(fd.detach())

    def _settle(self) -> None:
        """Close our write ends of processes that have been started; until then their starter needs them."""
        for witness, reference in list(self._starting):
            popen = reference()
            if popen is None or getattr(popen, "pid", None) is not None:
                self._starting.remove((witness, reference))
                witness.let_go()
                if popen is not None:
                    self._add(witness)

    def _add(self, witness: Witness) -> None:
        self.ever = True
        self._witnesses.append(witness)


_all: weakref.WeakSet[Holders] = weakref.WeakSet()
_forking = threading.local()
#: In a forked child: the write ends it inherited, which say that it is still there.
_inherited: list[int] = []


def _before_fork() -> None:
    _forking.witness = None
    if _all:
        with contextlib.suppress(OSError):
            _forking.witness = Witness()


def _after_fork_in_parent() -> None:
    witness = getattr(_forking, "witness", None)
    if witness is not None:
        _forking.witness = None
        witness.let_go()
        for holders in list(_all):
            holders.watched()  # forgets who is gone, or a program that forks often would run out of descriptors
            holders._add(witness)


def _after_fork_in_child() -> None:
    witness = getattr(_forking, "witness", None)
    if witness is not None:
        _forking.witness = None
        _inherited.append(witness.write_end)
        witness.write_end = -1
    for holders in list(_all):
        holders._starting = []
        holders._witnesses = []
        holders.ever = False


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
