"""Who takes part in a channel, which blocks each of them has, and whether it is still there.

    control memfd, shared by all                        arena of a producer
      0        participants so far                        lease table: FREE, ON_LOAN, UNUSED
      4 KiB    two flags each: receiving, waiting         blocks
      +2 MiB   bytes each has committed for its blocks    claims: the number of the participant that received it
      2^40+i   record lock i: participant i is there

A participant (a process that received or lent a block) has a number, which is never given to another one. Its lock
belongs to an *open file description* of its own, which the kernel closes when the process and all the children forked
from it are gone: just those who may still look at a block that it received. No pid is compared, so none is mistaken.

Owner      of the description: this process's `Presence`, which every arena that it received blocks from keeps, and
           so every open lease: it outlives the queue. A forked child keeps its parent's until it ends.
Death      in the middle of registering: the locks go with the process; a number that was taken is left out.
           at any other instant: what it claimed is void as soon as its lock is gone.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from multiprocessing import context, reduction
from typing import Any

from torchcrew.errors import ArenaFull
from torchcrew.memory import byte_locks, libc
from torchcrew.memory.arena import SLOTS, Arena, make_memfd
from torchcrew.memory.limits import file_size_limit

__all__ = ("PARTICIPANTS", "ClaimedArena", "Claims", "Presence")

#: Processes that may take part in one channel in the course of its life; sparse, so the number costs nothing.
PARTICIPANTS = 1 << 20
_FLAGS = 4 << 10
_COMMITTED = _FLAGS + 2 * PARTICIPANTS
_CONTROL_BYTES = _COMMITTED + 8 * PARTICIPANTS
_RECEIVING, _WAITING = 0, 1
#: Where the locks are: far beyond the data, which they do not protect.
_LOCKS = 1 << 40
_REGISTERING = _LOCKS - 1
#: Registering is over in microseconds; who finds another one at it looks again after this, in seconds.
_NAP = 50e-6

_CLAIM_BYTES = 4 * SLOTS
_ARENA_BYTES = 1 << 40
#: An arena that `ulimit -f` makes smaller than this is of no use.
_ARENA_LEAST = 1 << 20


class Presence:
    """An open file description whose locks say that this process, or one forked from it, is there."""

    __slots__ = ("__weakref__", "_fd", "number")

    def __init__(self, control: int) -> None:
        self._fd = byte_locks.reopen(control)
        self.number = 0
        _presences.add(self)

    def try_lock(self, at: int) -> bool:
        """Lock one byte; False if another description has it locked."""
        return byte_locks.lock(self._fd, at)

    def unlock(self, at: int) -> None:
        """Unlock one byte."""
        byte_locks.unlock(self._fd, at)

    def close(self) -> None:
        """Give up the locks, unless a forked child has the description, too; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()


class ClaimedArena(Arena):
    """An arena that any number of consumers receive blocks from: a claim for each slot lies behind the blocks.

    The owner sets a claim to 0 before it lends the block; who received the block stores its number there.
    """

    def __init__(self, fd: int, presence: Presence | None = None) -> None:
        size = os.fstat(fd).st_size - _CLAIM_BYTES
        try:
            super().__init__(fd, size)
            self.claims = memoryview(self.mapping.view(size, _CLAIM_BYTES)).cast("B").cast("I")
        except BaseException:  # no address space left, say
            self.mapping.close()
            raise
        self.presence = presence

    @classmethod
    def create(cls) -> ClaimedArena:
        """A new, empty arena; as large as `ulimit -f` lets a file be, at most 1 TiB.

        Raises:
            ArenaFull: that is too little.
        """
        size = min(_ARENA_BYTES, file_size_limit()) // libc.PAGE * libc.PAGE
        if size < SLOTS + _CLAIM_BYTES + _ARENA_LEAST:
            raise ArenaFull(
                f"no file of this process may be larger than {size} bytes (`ulimit -f`): no room for blocks"
            )
        return cls(make_memfd("torchcrew-arena", size))


class Claims:
    """The control memory of one channel. Every method may be called by any thread; pickles while a process starts."""

    def __init__(self) -> None:
        self._take(make_memfd("torchcrew-claims", _CONTROL_BYTES))

    def _take(self, control: int) -> None:
        self._control = control
        weakref.finalize(self, os.close, control).atexit = False
        view = memoryview(libc.view_of(libc.map_shared(control, 0, _CONTROL_BYTES), _CONTROL_BYTES)).cast("B")
        self._count = view[:8].cast("Q")
        self._flags = view[_FLAGS:_COMMITTED]
        self._committed = view[_COMMITTED:].cast("Q")
        self._renew()
        _all.add(self)

    def _renew(self) -> None:
        """In the maker and in every forked child: nothing is registered."""
        self.presence: Presence | None = None
        self._registering = threading.RLock()
        self._counting = threading.RLock()  # reentrant, as a signal handler may get a message, too
        self._now = [0, 0]

    def __reduce__(self) -> Any:
        context.assert_spawning(self)
        return _attach, (reduction.DupFd(self._control),)

    # Being there ------------------------------------------------------------------------------------------------------

    def register(self) -> Presence:
        """This process's presence, from 1; made at the first call.

        Raises:
            OSError: no descriptor is left, or /proc is not there.
            RuntimeError: more than `PARTICIPANTS` processes have taken part.
        """
        found = self.presence
        if found is None:
            with self._registering:
                found = self.presence
                if found is None:
                    found = self.presence = self._register()
        return found

    def _register(self) -> Presence:
        presence = Presence(self._control)
        while not presence.try_lock(_REGISTERING):
            time.sleep(_NAP)
        number = self._count[0] + 1
        if number >= PARTICIPANTS:
            raise RuntimeError(f"more than {PARTICIPANTS} processes have used this channel")
        # In this order: a number that the others take into account is locked, or its process is gone.
        presence.try_lock(_LOCKS + number)
        self._count[0] = number
        presence.unlock(_REGISTERING)
        presence.number = number
        return presence

    def is_alive(self, number: int) -> bool:
        """Whether a participant, or a process forked from it, is there."""
        presence = self.presence
        if presence is not None and presence.number == number:
            return True
        return byte_locks.is_locked(self._control, _LOCKS + number)

    # Receiving --------------------------------------------------------------------------------------------------------

    def begin_receiving(self) -> None:
        """To be called before a message is received; `end_receiving` when what is in it has been claimed."""
        self._change(_RECEIVING, 1)

    def end_receiving(self) -> None:
        """See `begin_receiving`."""
        self._change(_RECEIVING, -1)

    def begin_waiting(self) -> None:
        """To be called before this process sleeps until a message comes."""
        self._change(_WAITING, 1)

    def end_waiting(self) -> None:
        """See `begin_waiting`."""
        self._change(_WAITING, -1)

    def _change(self, kind: int, by: int) -> None:
        presence = self.presence or self.register()
        with self._counting:
            self._now[kind] += by
            self._flags[2 * presence.number + kind] = self._now[kind] > 0

    def anybody_receives(self) -> bool:
        """Whether a living participant is between receiving a message and claiming its blocks."""
        flags = bytes(self._flags[: 2 * (self._count[0] + 1)])[_RECEIVING::2]
        number = flags.find(1)
        while number >= 0:
            if self.is_alive(number):
                return True
            self._flags[2 * number + _RECEIVING] = 0
            number = flags.find(1, number + 1)
        return False

    def waits(self, number: int) -> bool:
        """Whether a participant sleeps until a message comes."""
        return bool(self._flags[2 * number + _WAITING])

    # The budget -------------------------------------------------------------------------------------------------------

    def commit(self, nbytes: int) -> None:
        """Say how much memory this process has for its blocks."""
        self._committed[self.register().number] = nbytes

    def committed(self) -> tuple[int, int]:
        """What all living producers have committed together, and how many of them have something."""
        every = self._committed[: self._count[0] + 1].tolist()
        total = producers = 0
        for number, nbytes in enumerate(every):
            if nbytes:
                if self.is_alive(number):
                    total += nbytes
                    producers += 1
                else:
                    self._committed[number] = 0
        return total, producers


def _attach(control: Any) -> Claims:
    claims = Claims.__new__(Claims)
    claims._take(control.detach())
    return claims


_all: weakref.WeakSet[Claims] = weakref.WeakSet()
_presences: weakref.WeakSet[Presence] = weakref.WeakSet()
_forking = threading.local()
#: Those of this process's ancestors whose blocks it may still see.
_inherited: list[Presence] = []


def _before_fork() -> None:
    _forking.presences = list(_presences)


def _after_fork_in_parent() -> None:
    _forking.presences = []


def _after_fork_in_child() -> None:
    for presence in _forking.__dict__.pop("presences", ()):
        if presence.number:
            _inherited.append(presence)
        else:  # another thread is registering: nothing was received with it, and it must not keep its lock here
            presence.close()
    for claims in list(_all):
        claims._renew()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
