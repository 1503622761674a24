"""The memory that the ranks of a group have in common: two pages of each, semaphores, a line of status, and the mail.

    memfd   │ status of rank 0..N-1 │ semaphores: 2 of each rank │ pages of rank 0 │ pages of rank 1 │ ... │ mail
    page    │ head: what is called, and with what │ room for data: CAPACITY bytes │     even turns, odd turns

Owner      the mapping: each rank, one. The first rank makes the memfd; the others open it once, through /proc. Nobody
           keeps a descriptor.
Memory     pages of a memfd cost memory once they are written: a group that only has barriers needs some KB.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

import torch

from torchcrew.collectives import mailbox, semaphore
from torchcrew.memory import libc
from torchcrew.memory.arena import make_memfd

__all__ = ("HEAD", "NAME", "Segment", "State", "capacity")

NAME = "torchcrew-group"
#: Bytes of the head of a page: what is called, where a shared tensor lies, and the sizes of up to 117 splits.
HEAD = 1024
#: Bytes of the room of a page for each rank of the group, and of the whole at least; see `benchmarks/collectives.py`.
_SHARE, _LEAST = 16 << 10, 1 << 20
_STATUS = 1024  # of each rank
_TURN = struct.Struct("<Q")  # how many turns a rank has ended, at the begin of its status
_TEXT = struct.Struct("<BH")  # behind it: its state, and the bytes of the reason


class State:
    """What a rank says of itself in its status."""

    TAKES_PART, FAILED, LEFT = range(3)


def capacity(size: int) -> int:
    """Bytes of data in a page, for a group of ``size`` ranks: a multiple of 64 for each of them."""
    share = max(_SHARE, _LEAST // size)
    return size * (-(-share // 1024) * 1024)


def _pages(size: int) -> int:
    """Where the pages of the ranks begin."""
    return -(-size * (_STATUS + 2 * semaphore.BYTES) // libc.PAGE) * libc.PAGE


class Segment:
    """One rank's view of the memory of its group.

    Args:
        fd: of the memfd; the caller keeps it.
        size: how many ranks.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self.capacity = capacity(size)
        nbytes = self.nbytes(size)
        self._view: Any = libc.view_of(libc.map_shared(fd, 0, nbytes), nbytes)
        self._bytes = memoryview(self._view).cast("B")
        self._address = ctypes.addressof(self._view)
        self._first = _pages(size)

    @classmethod
    def nbytes(cls, size: int) -> int:
        """Bytes of the memfd."""
        return cls._mail(size) + mailbox.nbytes(size)

    @staticmethod
    def _mail(size: int) -> int:
        return -(-(_pages(size) + 2 * size * (HEAD + capacity(size))) // libc.PAGE) * libc.PAGE

    @classmethod
    def create(cls, size: int) -> tuple[int, Segment]:
        """A new one, and the descriptor that others open it by; the caller closes it."""
        fd = make_memfd(NAME, cls.nbytes(size))
        try:
            made = cls(fd, size)
        except BaseException:
            os.close(fd)
            raise
        for number in range(2 * size):
            semaphore.initialize(made._semaphore(number))
        mailbox.initialize(made.mail()[1], size)
        return fd, made

    def close(self) -> None:
        """Let go of the mapping; it is gone when the views of it are."""
        self._view = None
        self._bytes = memoryview(b"")

    def _semaphore(self, number: int) -> int:
        return self._address + self.size * _STATUS + number * semaphore.BYTES

    def semaphore(self, rank: int, parity: int) -> Any:
        """What the others post when they have come to a turn, even or odd, that ``rank`` waits for."""
        return semaphore.at(self._semaphore(2 * rank + parity))

    def _page(self, rank: int, parity: int) -> int:
        return self._first + (2 * rank + parity) * (HEAD + self.capacity)

    def head(self, rank: int, parity: int) -> memoryview:
        """The head of a page."""
        begin = self._page(rank, parity)
        return self._bytes[begin : begin + HEAD]

    def room(self, rank: int, parity: int) -> torch.Tensor:
        """The room for data of a page, as bytes."""
        return torch.frombuffer(
            self._view, dtype=torch.uint8, offset=self._page(rank, parity) + HEAD, count=self.capacity
        )

    def mail(self) -> tuple[memoryview, int]:
        """The memory of messages, and its address; it stays mapped as long as the former lives."""
        begin = self._mail(self.size)
        return self._bytes[begin:], self._address + begin

    # A rank writes only its own status. The text is written before the state, and read behind it: who waits looks
    # some thousand times a second, and takes a reason that it finds late one look later.

    def set_turn(self, rank: int, turn: int) -> None:
        """How many turns ``rank`` has come to: to say who is missing."""
        _TURN.pack_into(self._bytes, rank * _STATUS, turn)

    def turn(self, rank: int) -> int:
        """How many turns it has come to."""
        return int(_TURN.unpack_from(self._bytes, rank * _STATUS)[0])

    def set_state(self, rank: int, state: int, reason: str = "") -> None:
        """Say that ``rank`` takes no part any more, and why."""
        text = reason.encode()[: _STATUS - _TURN.size - _TEXT.size]
        begin = rank * _STATUS + _TURN.size
        self._bytes[begin + _TEXT.size : begin + _TEXT.size + len(text)] = text
        _TEXT.pack_into(self._bytes, begin, state, len(text))

    def state(self, rank: int) -> tuple[int, str]:
        """The state of ``rank``, and its reason."""
        begin = rank * _STATUS + _TURN.size
        state, length = _TEXT.unpack_from(self._bytes, begin)
        text = bytes(self._bytes[begin + _TEXT.size : begin + _TEXT.size + length])
        return state, text.decode(errors="replace")
