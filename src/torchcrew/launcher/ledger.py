"""What each rank does, in shared memory: to be read when its writer hangs, is stopped, or is dead.

    ┌─ head ──────────────────┐ ┌─ rank 0 ─────────────────────────────────────────┐ ┌─ rank 1 ─┐ ...
    │ magic, version, count   │ │ state │ state │ 64 keys │ call │ call │ ... (64)   │ │          │
    │ pid of each rank        │ │ by turns      │ one for each call                 │ │          │
    └─────────────────────────┘ └──────────────────────────────────────────────────┘ └──────────┘

Owner      who creates it; every rank inherits the memfd and maps it. A rank writes its own part only.
Reading    takes no lock and waits for nobody. Each record ends in, or begins with, a checksum of itself, so a reader
           knows one that is half written, on every machine, whatever the order in which stores become visible there.
           Of the two states only the older one is ever written over: the newer one is whole at any instant.
Death      a rank killed in the middle of writing leaves its last state; of its calls at most the one it was about to
           begin is missing. Everybody else: the kernel frees the memory with the last process that has it.
Foreign    `Ledger.of_process` reads another process's memfd by `pread`: that file may shrink, and a mapping would be
           a crash then.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing import reduction
from typing import Any, NamedTuple

from torchcrew.launcher.calls import (
    COMMON,
    RECORD,
    Call,
    cut,
    decode,
    encode,
    is_whole,
    key_of,
    number_of,
    place_of,
    texts_of,
    what_of,
)
from torchcrew.memory.arena import make_memfd
from torchcrew.memory.mapping import Mapping, round_block

__all__ = ("CALLS_KEPT", "MOST_RANKS", "Begun", "Call", "Entry", "Ledger", "Phase")

#: Calls of a rank that can be found: as far as ranks may be apart and still be compared.
CALLS_KEPT = 64

_NAME = "torchcrew-ledger"
_LINK = f"/memfd:{_NAME} (deleted)"  # as it stands in /proc/PID/fd
_MAGIC, _VERSION = b"tcledger", 1
_HEAD = struct.Struct("<8sqq")  # magic, version, count
_PIDS = 64  # offset
_WORD = struct.Struct("<q")
#: ticks, phase, calls, steps, number of the call it is in (0: none); then a checksum.
_STATE = struct.Struct("<qqqqq")
_STATES = (0, 64)  # offsets: a cache line each
_CHECK = struct.Struct("<I")
_KEYS, _SLOTS = 128, 1024  # offsets of the keys and of the calls
_KEY = struct.Struct("<Q")
#: A page and a bit for every rank, rounded so that no two of them share a page.
_RANK = 20480
#: As many as have their pids in the head.
MOST_RANKS = (_RANK - _PIDS) // _WORD.size
#: Reads until a record is whole. One that fails was overtaken by its writer, which needs ten times as long.
_TRIES = 100


class Phase(IntEnum):
    """Where a rank is in its life."""

    STARTING = 0
    IDLE = 1  # waits for something to run
    RUNNING = 2
    RETURNED = 3
    FAILED = 4


@dataclass(frozen=True)
class Entry:
    """What a rank does."""

    phase: Phase
    call: Call | None
    """The collective it is in now."""
    calls: int
    """Collectives begun."""
    steps: int
    ticks: int
    """Different after any progress: a phase, a call that began or ended, a step."""


class Begun(NamedTuple):
    """A call in the ledger, for who wrote it."""

    number: int
    key: int
    record: bytes


class Ledger:
    """Shared notes of all ranks of this host. Pickles by descriptor while a process starts.

    Ranks here are indices among the ranks of this host. Each has one writing process; its threads may write at once.
    """

    def __init__(self, fd: int, count: int, writable: bool = True) -> None:
        self.count = count
        self._fd = fd
        self._mapping = Mapping(fd) if writable else None
        self._bytes: memoryview | None = None
        if self._mapping is not None:
            self._bytes = memoryview(self._mapping.view(0, _size(count))).cast("B")
        self._writers: dict[int, _Writer] = {}
        self._windows: dict[int, tuple[memoryview, list[memoryview]]] = {}

    @classmethod
    def create(cls, count: int) -> Ledger:
        """An empty one for ``count`` ranks.

        Raises:
            ValueError: there is no room for so many (`MOST_RANKS`).
        """
        if not 0 < count <= MOST_RANKS:
            raise ValueError(f"a ledger has room for 1 to {MOST_RANKS} ranks, not {count}")
        ledger = cls(make_memfd(_NAME, _size(count)), count)
        ledger._write(0, _HEAD.pack(_MAGIC, _VERSION, count))
        return ledger

    @classmethod
    def of_process(cls, pid: int) -> Ledger | None:
        """The ledger that a process of the same user has open, to read; None if it has none, or is gone."""
        folder = f"/proc/{pid}/fd"
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(folder), key=int):
                with contextlib.suppress(OSError):
                    if os.readlink(f"{folder}/{name}") == _LINK:
                        found = _opened(f"{folder}/{name}")
                        if found is not None:
                            return found
        return None

    def __reduce__(self) -> Any:
        return _attach, (reduction.DupFd(self._fd), self.count)

    def close(self) -> None:
        """Let go of it, here; any other use is a `ValueError` then. Idempotent."""
        fd, self._fd = self._fd, -1
        self._bytes = None
        self._writers.clear()
        self._windows.clear()
        if self._mapping is not None:
            self._mapping.close()
        elif fd >= 0:
            os.close(fd)

    # What a rank writes.

    def set_pid(self, rank: int, pid: int) -> None:
        """This process is that rank."""
        self._write(self._checked(rank) * _WORD.size + _PIDS, _WORD.pack(pid))

    def enter(self, rank: int, phase: Phase) -> None:
        """The rank is in another phase."""
        self._writer(rank).publish(phase=phase)

    def step(self, rank: int) -> None:
        """The rank has begun another training step."""
        self._writer(rank).publish(steps=1)

    def begin(self, rank: int, call: Call) -> Begun:
        """The rank is about to make that call."""
        return self.begin_packed(
            rank,
            place_of(call.generation, call.group),
            call.generation,
            call.sequence,
            what_of(call.name, call.dtype, call.shape, call.detail),
            texts_of(call.group, call.site),
        )

    def begin_packed(self, rank: int, place: int, generation: int, sequence: int, what: bytes, texts: bytes) -> Begun:
        """As `begin`, for who calls it so often that it keeps the parts of a record."""
        return self._writer(rank).begin(place, generation, sequence, what, texts)

    def end(self, rank: int, still: Begun | None = None) -> None:
        """The rank's call has ended; another one of its threads may be ``still`` in one."""
        self._writer(rank).publish(current=still.number if still else 0)

    def withdraw(self, rank: int, begun: Begun) -> None:
        """The call was none: it failed before any peer could learn of it, and its number will be given again."""
        self._writer(rank).forget(begun)

    def clear(self, rank: int) -> None:
        """The rank is a new process: what the one before it called is not to be found any more."""
        self._writer(rank).clear()

    # What anybody reads.

    def members(self) -> list[tuple[int, int]]:
        """Rank and process of each rank that has started."""
        pids = self._read(_PIDS, _WORD.size * self.count)
        return [(rank, pid) for rank, (pid,) in enumerate(_WORD.iter_unpack(pids)) if pid]

    def entry(self, rank: int) -> Entry:
        """What a rank does, or did last."""
        base = _base(self._checked(rank))
        for _ in range(_TRIES):
            ticks, phase, calls, steps, current = self._state(rank)
            record = self._read(base + _SLOTS + current % CALLS_KEPT * RECORD, RECORD) if current else b""
            if not current or (is_whole(record) and number_of(record) == current):
                break
        else:  # at each look the call had been written over: it is long past
            record = b""
        known = 0 <= phase < len(Phase)  # a foreign ledger may say anything
        return Entry(Phase(phase if known else 0), decode(record) if record else None, calls, steps, ticks)

    def find(self, rank: int, group: str, sequence: int, generation: int | None = None) -> Call | None:
        """The rank's call of that number in that group; None if it is older than the last 64, or never was.

        Args:
            generation: of which default group; None for the newest that has one.
        """
        best = None
        for call in self._calls(rank):
            if (call.sequence, call.group) == (sequence, cut(group)) and generation in (None, call.generation):
                best = call if best is None or call.generation > best.generation else best
        return best if sequence else None

    def latest(self, rank: int, group: str, generation: int | None = None) -> int:
        """The highest number of a call of the rank in that group, as far as is known; 0 if there is none.

        Args:
            generation: of which default group; None for the newest in which the rank has called anything.
        """
        calls = list(self._calls(rank))
        if generation is None:
            generation = max((call.generation for call in calls), default=0)
        numbers = (c.sequence for c in calls if c.group == cut(group) and c.generation == generation)
        return max(numbers, default=0)

    def unlike(self, begun: Begun, peers: Iterable[int]) -> list[tuple[int, Call, Call]]:
        """The calls of peers under the same group and number that are not written just like ours.

        Returns:
            Peer, our call and its call, both as they are read from the ledger. Peers that are not there yet, or have
            gone far ahead, are left out.
        """
        sought, record = _KEY.pack(begun.key), begun.record
        ours, found = record[COMMON], []
        for peer in peers:
            keys, slots = self._windows.get(peer) or self._window(peer)
            at = keys.tobytes().find(sought)
            if at < 0 or (at % _KEY.size == 0 and slots[at // _KEY.size][COMMON].tobytes() == ours):
                continue
            theirs = self._keyed(keys, slots, sought)
            if theirs is not None:
                mine, other = decode(record), decode(theirs)
                if mine.group == other.group:  # else their keys are equal by chance
                    found.append((peer, mine, other))
        return found

    def _window(self, rank: int) -> tuple[memoryview, list[memoryview]]:
        """Where a rank's keys and calls are, for who reads them often."""
        if self._bytes is None:
            raise self._unmapped()
        part = self._bytes[_base(self._checked(rank)) :][:_RANK]
        slots = [part[at : at + RECORD] for at in range(_SLOTS, _SLOTS + RECORD * CALLS_KEPT, RECORD)]
        window = self._windows[rank] = (part[_KEYS : _KEYS + _KEY.size * CALLS_KEPT], slots)
        return window

    @staticmethod
    def _keyed(keys: memoryview, slots: list[memoryview], sought: bytes) -> bytes | None:
        """The whole record with that key."""
        at, seen = -1, keys.tobytes()
        while (at := seen.find(sought, at + 1)) >= 0:
            if at % _KEY.size:  # the bytes of two neighbours
                continue
            record = slots[at // _KEY.size].tobytes()
            # Written over since, as the key says then, or is being written over, as the checksum says.
            if keys[at : at + _KEY.size].tobytes() == sought and is_whole(record):
                return record
        return None

    def _calls(self, rank: int) -> Iterator[Call]:
        base = _base(self._checked(rank))
        keys = self._read(base + _KEYS, _KEY.size * CALLS_KEPT)
        for slot, (key,) in enumerate(_KEY.iter_unpack(keys)):
            record = self._read(base + _SLOTS + slot * RECORD, RECORD) if key else b""
            if record and is_whole(record):
                yield decode(record)

    def _state(self, rank: int) -> tuple[int, ...]:
        """The newer of the two states that is whole."""
        base = _base(rank)
        for _ in range(_TRIES):
            halves = [self._read(base + offset, _STATE.size + _CHECK.size) for offset in _STATES]
            whole = [_STATE.unpack_from(half) for half in halves if _has_check(half)]
            if whole:
                return max(whole)
            if not any(map(any, halves)):
                break  # it has not written any
        return (0, Phase.STARTING, 0, 0, 0)

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.count:
            raise IndexError(f"rank {rank} of a ledger of {self.count}")
        return rank

    def _writer(self, rank: int) -> _Writer:
        writer = self._writers.get(rank)
        if writer is None:
            self._checked(rank)
            if self._bytes is None:
                raise self._unmapped()
            base = _base(rank)
            writer = self._writers[rank] = _Writer(self._bytes[base : base + _RANK], self._state(rank))
        return writer

    def _read(self, offset: int, nbytes: int) -> bytes:
        if self._bytes is not None:
            return self._bytes[offset : offset + nbytes].tobytes()
        if self._fd < 0:
            raise self._unmapped()
        return os.pread(self._fd, nbytes, offset).ljust(nbytes, b"\0")

    def _unmapped(self) -> Exception:
        if self._fd < 0:
            return ValueError("the ledger is closed")
        return PermissionError("the ledger of another process is only read")

    def _write(self, offset: int, data: bytes) -> None:
        if self._bytes is None:
            raise self._unmapped()
        self._bytes[offset : offset + len(data)] = data


class _Writer:
    """What a rank's process needs to write its part."""

    def __init__(self, part: memoryview, state: tuple[int, ...]) -> None:
        self.keys = part[_KEYS : _KEYS + _KEY.size * CALLS_KEPT].cast("Q")
        self.ticks, self.phase, self.calls, self.steps, self.current = state
        self.slots = [part[at : at + RECORD] for at in range(_SLOTS, _SLOTS + RECORD * CALLS_KEPT, RECORD)]
        self.states = [part[at : at + _STATE.size + _CHECK.size] for at in _STATES]
        # A thread may be interrupted by a signal handler that writes, too.
        self.lock = threading.RLock()

    def publish(self, *, phase: int | None = None, steps: int = 0, current: int | None = None) -> None:
        with self.lock:
            self.ticks += 1
            self.steps += steps
            if phase is not None:
                self.phase = phase
            if current is not None:
                self.current = current
            self.put()

    def put(self) -> None:
        state = _STATE.pack(self.ticks, self.phase, self.calls, self.steps, self.current)
        self.states[self.ticks & 1][:] = state + _CHECK.pack(zlib.crc32(state))

    def begin(self, place: int, generation: int, sequence: int, what: bytes, texts: bytes) -> Begun:
        with self.lock:
            number = self.calls = self.current = self.calls + 1
            key = key_of(place, sequence, number)
            record = encode(number, generation, sequence, what, texts)
            slot = number % CALLS_KEPT
            self.keys[slot] = 0
            self.slots[slot][:] = record
            self.keys[slot] = key
            self.ticks += 1
            self.put()
            return Begun(number, key, record)

    def clear(self) -> None:
        with self.lock:
            for slot in range(CALLS_KEPT):
                self.keys[slot] = 0
            self.publish(current=0)

    def forget(self, begun: Begun) -> None:
        with self.lock:
            slot = begun.number % CALLS_KEPT
            if self.keys[slot] == begun.key:
                self.keys[slot] = 0


def _base(rank: int) -> int:
    return _RANK * (1 + rank)


def _size(count: int) -> int:
    return round_block(_RANK * (1 + count))


def _opened(path: str) -> Ledger | None:
    """The ledger in that file, if it is one."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        head = os.pread(fd, _HEAD.size, 0)
        if len(head) == _HEAD.size:
            magic, version, count = _HEAD.unpack(head)
            known = (magic, version) == (_MAGIC, _VERSION) and 0 < count <= MOST_RANKS
            if known and os.fstat(fd).st_size == _size(count):
                ledger = Ledger(fd, count, writable=False)
                fd = -1
                return ledger
    finally:
        if fd >= 0:
            os.close(fd)
    return None


def _has_check(state: bytes) -> bool:
    return bool(_CHECK.unpack_from(state, _STATE.size)[0] == zlib.crc32(state[: _STATE.size]))


def _attach(fd: Any, count: int) -> Ledger:
    return Ledger(fd.detach(), count)
