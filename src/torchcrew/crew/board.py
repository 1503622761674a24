"""The crew's notice board: one small memfd that every worker of a crew and its user map.

    ┌─ done, wanted, expected ─┐ ┌─ worker 0: 8 fields ─┐ ┌─ worker 1 ─┐ ...      each an i64
    │  by the user             │ │ by worker 0          │ │            │
    └──────────────────────────┘ └──────────────────────┘ └────────────┘

Every field has one writer, so nothing is ever locked; readers may see the fields of a worker at slightly different
moments. `done` ends the crew, `wanted` says what the user waits for, the workers' fields are their state and counters:
`stats()`, reports and the memory budget only read them.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from multiprocessing import reduction
from typing import Any, NamedTuple

from torchcrew.memory.arena import make_memfd
from torchcrew.memory.mapping import Mapping, round_block

__all__ = ("ANYTHING", "NOTHING", "Board", "State", "WorkerCounters")

#: Values of `wanted` beside the number of a message: the user is busy / takes whatever comes first.
NOTHING, ANYTHING = -1, -2

_LINE = 8  # fields: a cache line each, or the writers would slow each other
_COUNTERS = struct.Struct("8q")
_DONE, _WANTED, _EXPECTED = range(3)


class State(IntEnum):
    """What a worker is doing."""

    IDLE = 0  # waits for something to do
    BUSY = 1
    BLOCKED = 2  # waits for the user: no room in memory


class WorkerCounters(NamedTuple):
    """One worker's fields, at about one moment."""

    state: State
    committed: int  # bytes of shared memory its arena takes
    items: int  # messages sent
    bytes: int  # in blocks
    current: int  # number of the message it works on
    idle_ns: int
    busy_ns: int
    blocked_ns: int


class Board:
    """Shared flags and counters of one crew. Pickles by descriptor while a process starts."""

    def __init__(self, fd: int, workers: int) -> None:
        self.workers = workers
        self._mapping = Mapping(fd)
        self._bytes = memoryview(self._mapping.view(0, _size(workers))).cast("B")
        self._fields = self._bytes.cast("q")

    @classmethod
    def create(cls, workers: int) -> Board:
        """A board with nothing on it."""
        board = cls(make_memfd("torchcrew-board", _size(workers)), workers)
        board.want(NOTHING)
        return board

    def __reduce__(self) -> Any:
        return _attach, (reduction.DupFd(self._mapping.fd), self.workers)

    def close(self) -> None:
        """Nobody will be given this board any more; whoever has it can still read and write it. Idempotent."""
        self._mapping.close()

    @property
    def done(self) -> bool:
        """Whether the crew is to end."""
        return self._fields[_DONE] != 0

    def set_done(self) -> None:
        """Tell every worker to end."""
        self._fields[_DONE] = 1

    def want(self, number: int) -> None:
        """The user waits for message ``number``, or `ANYTHING`, or `NOTHING`."""
        self._fields[_WANTED] = number

    @property
    def wanted(self) -> int:
        """What the user waits for."""
        return self._fields[_WANTED]

    def expect(self, number: int) -> None:
        """Message ``number`` is what the user needs next, whether it waits for it already or not; or `ANYTHING`."""
        self._fields[_EXPECTED] = number

    @property
    def expected(self) -> int:
        """What the user needs next."""
        return self._fields[_EXPECTED]

    def write(self, worker: int, counters: WorkerCounters) -> None:
        """Publish a worker's fields. Only that worker calls it."""
        _COUNTERS.pack_into(self._bytes, 8 * _LINE * (1 + worker), *counters)

    def set_state(self, worker: int, state: State) -> None:
        """Publish a worker's state alone. Only that worker calls it."""
        self._fields[_LINE * (1 + worker)] = state

    def read(self, worker: int) -> WorkerCounters:
        """A worker's fields."""
        state, *rest = _COUNTERS.unpack_from(self._bytes, 8 * _LINE * (1 + worker))
        return WorkerCounters(State(state), *rest)

    def committed(self) -> int:
        """Bytes of shared memory that all workers' arenas take."""
        return sum(self.read(worker).committed for worker in range(self.workers))


def _size(workers: int) -> int:
    return round_block(8 * _LINE * (1 + workers))


def _attach(fd: Any, workers: int) -> Board:
    return Board(fd.detach(), workers)
