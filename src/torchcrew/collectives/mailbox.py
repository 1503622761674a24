"""The rings through which messages go, one for each ordered pair of ranks, in the memory of their group.

    bell of rank 0..N-1 │ filled, free of each pair │ ring 0 → 0 │ ring 0 → 1 │ ...    a ring: SLOTS slots

    sender      waits for `free` ──► writes a slot ──► posts `filled` and the receiver's bell
    receiver    waits for `filled` ──► reads the slot ──► posts `free` and the sender's bell

A message  its tag, size and number, then its bytes; the first slot has both, others only bytes. One larger than the
           ring goes through it while the receiver reads.
Fences     the semaphores, and nothing else: who has `filled` reads what was written before, who has `free` may write.
Bell       one semaphore of a rank, for all rings that it has an end of: a rank sleeps in one place only. Whoever moves
           a slot takes one ring back if there is one, so that they do not pile up; one too many is a look for nothing.
Memory     that of a ring is allocated when it is written.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

from torchcrew.collectives import semaphore
from torchcrew.memory import libc

__all__ = ("SLOTS", "Inlet", "Load", "Outlet", "bell", "initialize", "nbytes")

SLOTS = 8
#: Bytes of a slot at most and at least, and of all rings to one rank together unless that needs smaller slots.
_LARGEST, _SMALLEST, _RINGS = 64 << 10, 4 << 10, 4 << 20
#: Tag, bytes, number of the message between the two; then room up to a line of the cache.
_HEADER = struct.Struct("<qQQ")
_HEADER_ROOM = 64
#: Slots behind which the other side is woken, if the message does not end before: each wake-up may cost a switch.
_BATCH = SLOTS // 2

# Not `ctypes.memmove`, which lets go of the interpreter's lock: a thread that sends beside one that computes in Python
# would wait 5 ms for it again, for each slot of some µs.
_copy: Any = ctypes.PyDLL(None).memmove
_copy.argtypes, _copy.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_void_p


def _slot(size: int) -> int:
    """Bytes of a slot in a group of ``size`` ranks."""
    share = _RINGS // size // SLOTS // libc.PAGE * libc.PAGE
    return max(_SMALLEST, min(_LARGEST, share))


def _rings(size: int) -> int:
    """Where the rings begin."""
    return -(-(size + 2 * size * size) * semaphore.BYTES // libc.PAGE) * libc.PAGE


def nbytes(size: int) -> int:
    """Bytes of all of it, for a group of ``size`` ranks."""
    return _rings(size) + size * size * SLOTS * _slot(size)


def initialize(address: int, size: int) -> None:
    """Make the semaphores; once for a group."""
    for number in range(size):
        semaphore.initialize(address + number * semaphore.BYTES)
    for number in range(size, size + 2 * size * size, 2):
        semaphore.initialize(address + number * semaphore.BYTES)
        semaphore.initialize(address + (number + 1) * semaphore.BYTES, SLOTS)


def bell(address: int, rank: int) -> Any:
    """The semaphore that a rank sleeps in."""
    return semaphore.at(address + rank * semaphore.BYTES)


class Load:
    """The bytes of a message, on their way out of memory here or into it.

    Args:
        address: where they lie; 0: they are thrown away.
    """

    def __init__(self, tag: int, size: int, address: int) -> None:
        self.tag, self.size, self.address = tag, size, address
        self.moved = 0
        self.has_begun = False

    @property
    def has_ended(self) -> bool:
        """Whether all of it has gone."""
        return self.has_begun and self.moved == self.size


class _End:
    """What both ends of a ring have.

    Args:
        memory: of all rings; it stays mapped while this lives.
        address: of that.
        size: how many ranks.
        pair: sender and receiver.
        me: which of them this process is.
    """

    def __init__(self, memory: memoryview, address: int, size: int, pair: tuple[int, int], me: int) -> None:
        number = pair[0] * size + pair[1]
        self.slot = _slot(size)
        self.memory = memory
        self.offset = _rings(size) + number * SLOTS * self.slot
        self.address = address + self.offset
        self.count = 0
        """Slots that this end has moved."""
        self.messages = 0
        """Messages that this end has begun."""
        other = pair[1] if pair[0] == me else pair[0]
        filled = address + (size + 2 * number) * semaphore.BYTES
        self.filled, self.free = semaphore.at(filled), semaphore.at(filled + semaphore.BYTES)
        self.ring: Callable[[], None] = bell(address, other).release
        self.take_back: Callable[[bool], bool] = bell(address, me).acquire

    def _move(self, load: Load, take: Callable[[bool], bool], give: Callable[[], None]) -> bool:
        """Move as much of a message as there are slots to ``take``; each is given to the other side behind it."""
        moved = 0
        while not load.has_ended and moved < SLOTS and take(False):
            begin = self.count % SLOTS * self.slot
            room, slot = self.slot, self.address + begin
            if not load.has_begun:
                self._begin(load, self.offset + begin)
                room, slot = room - _HEADER_ROOM, slot + _HEADER_ROOM
                load.has_begun = True
            some = min(room, load.size - load.moved)
            if some:
                self._carry(slot, load.address and load.address + load.moved, some)
            load.moved += some
            self.count += 1
            moved += 1
            give()
            self.take_back(False)
            if moved % _BATCH == 0:
                self.ring()
        if moved % _BATCH:
            self.ring()
        return moved > 0

    def _begin(self, load: Load, header: int) -> None:
        """The first slot of a message: its header is there, or is written there."""
        raise NotImplementedError

    def _carry(self, slot: int, message: int, nbytes: int) -> None:
        """Copy between a slot and the message, which is at 0 if it is thrown away."""
        raise NotImplementedError


class Outlet(_End):
    """The sender's end. One thread at a time."""

    def send(self, load: Load) -> bool:
        """Put as much of a message into the ring as has room now, in its order; whether anything has gone."""
        return self._move(load, self.free.acquire, self.filled.release)

    def _begin(self, load: Load, header: int) -> None:
        self.messages += 1
        _HEADER.pack_into(self.memory, header, load.tag, load.size, self.messages)

    def _carry(self, slot: int, message: int, nbytes: int) -> None:
        _copy(slot, message, nbytes)


class Inlet(_End):
    """The receiver's end. One thread at a time: `open`, then `read` until that message has ended."""

    _opened = False  # the slot with the header is taken, and not read yet

    def open(self) -> tuple[int, int] | None:
        """Tag and bytes of the next message, if it has begun to come."""
        if not self.filled.acquire(False):
            return None
        self._opened = True
        self.messages += 1
        tag, size, number = _HEADER.unpack_from(self.memory, self.offset + self.count % SLOTS * self.slot)
        assert number == self.messages, f"message {number} came in the place of message {self.messages}"
        return tag, size

    def read(self, load: Load) -> bool:
        """Take out of the ring as much of the opened message as is there; whether anything has come."""
        return self._move(load, self._take, self.free.release)

    def _take(self, block: bool) -> bool:
        return self._opened or bool(self.filled.acquire(block))

    def _begin(self, load: Load, header: int) -> None:
        self._opened = False

    def _carry(self, slot: int, message: int, nbytes: int) -> None:
        if message:
            _copy(message, slot, nbytes)
