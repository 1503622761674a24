"""What loaders did: batches, bytes, who waited for whom. Costs the training loop two clock readings a batch."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass
from typing import Any

import torch.utils.data

from torchcrew.crew.board import Board

__all__ = ("LoaderRecord", "LoaderStats", "loader_stats", "record_of")

#: Loaders remembered after they are gone: a program that makes one per epoch must not grow for ever.
_REMEMBERED = 256


@dataclass(frozen=True)
class LoaderStats:
    """One loader, over all its epochs so far; times in seconds."""

    name: str
    """The dataset's type; of a wrapper, such as a subset, also what it wraps."""
    workers: int
    """Worker processes."""
    epochs: int
    """Epochs begun."""
    batches: int
    """Batches delivered; workers may have made more."""
    bytes: int
    """Bytes of all batches made, in shared memory; small batches travel inline and count as 0."""
    wait_s: float
    """How long the training loop waited for batches, once there were workers."""
    first_batch_s: float
    """From making the first iterator to its first batch, the start of the workers included."""
    busy_s: float
    """How long the workers fetched and collated, summed over workers."""
    idle_s: float
    """How long the workers had nothing to do."""
    blocked_s: float
    """How long the workers waited for memory."""
    started_at: float
    """When the first iterator was made (`time.time()`)."""
    ended_at: float
    """When the training loop last waited for a batch."""


class LoaderRecord:
    """Adds up one loader's numbers; read with `stats`."""

    def __init__(self, name: str, workers: int) -> None:
        self._name = name
        self._workers = workers
        self._epochs = 0
        self._delivered = 0
        self._iterators: weakref.WeakSet[Any] = weakref.WeakSet()
        self._wait_ns = 0
        self._first_ns: int | None = None
        self._begun_ns = time.perf_counter_ns()
        self._waited_ns = self._begun_ns
        self._started_at = time.time()
        self._boards: list[Board] = []
        self._past = [0, 0, 0, 0]  # bytes, busy, idle, blocked of crews that have ended

    def begin_epoch(self, iterator: Any, board: Board) -> None:
        """An epoch of ``iterator`` begins, with a crew that is new or was kept."""
        self._epochs += 1
        self._delivered += iterator._num_yielded
        self._iterators.add(iterator)
        if not any(board is known for known in self._boards):
            self._boards.append(board)

    def waited(self, begin_ns: int, end_ns: int) -> None:
        """The training loop waited from ``begin_ns`` to ``end_ns`` of `time.perf_counter_ns`."""
        if self._first_ns is None:
            self._first_ns = end_ns - self._begun_ns
        self._wait_ns += end_ns - begin_ns
        self._waited_ns = end_ns

    def end(self, iterator: Any, board: Board) -> None:
        """A crew has ended: keep its sums."""
        if iterator in self._iterators:
            self._iterators.discard(iterator)
            self._delivered += iterator._num_yielded
        if any(board is known for known in self._boards):
            self._boards = [known for known in self._boards if known is not board]
            self._past = [a + b for a, b in zip(self._past, _sums(board), strict=True)]

    def stats(self) -> LoaderStats:
        """The numbers so far."""
        sums = self._past
        for board in list(self._boards):
            sums = [a + b for a, b in zip(sums, _sums(board), strict=True)]
        nbytes, busy, idle, blocked = sums
        return LoaderStats(
            name=self._name,
            workers=self._workers,
            epochs=self._epochs,
            batches=self._delivered + sum(iterator._num_yielded for iterator in self._iterators),
            bytes=nbytes,
            wait_s=self._wait_ns / 1e9,
            first_batch_s=(self._first_ns or 0) / 1e9,
            busy_s=busy / 1e9,
            idle_s=idle / 1e9,
            blocked_s=blocked / 1e9,
            started_at=self._started_at,
            ended_at=self._started_at + (self._waited_ns - self._begun_ns) / 1e9,
        )


def _sums(board: Board) -> list[int]:
    workers = [board.read(number) for number in range(board.workers)]
    columns = zip(*((w.bytes, w.busy_ns, w.idle_ns, w.blocked_ns) for w in workers), strict=True)
    return [sum(column) for column in columns]


def _name(dataset: Any) -> str:
    """The dataset's type; of a wrapper, such as a subset, also what it wraps."""
    # Attributes are looked up without running any code of the dataset's.
    dataset = getattr(dataset, "__dict__", {}).get("_datapipe", dataset)
    inner = getattr(dataset, "__dict__", {}).get("dataset")
    name = type(dataset).__name__
    return f"{name} of {type(inner).__name__}" if isinstance(inner, torch.utils.data.Dataset) else name


_records: list[LoaderRecord] = []
_by_loader: dict[int, LoaderRecord] = {}


def record_of(loader: Any) -> LoaderRecord:
    """The record of a loader; made when its first iterator is."""
    # By identity: a loader's class may have made it unhashable, or equal to another one.
    record = _by_loader.get(id(loader))
    if record is None:
        weakref.finalize(loader, _by_loader.pop, id(loader), None).atexit = False
        record = _by_loader[id(loader)] = LoaderRecord(_name(loader.dataset), loader.num_workers)
        _records.append(record)
        del _records[:-_REMEMBERED]
    return record


def loader_stats() -> list[LoaderStats]:
    """The numbers of this process's loaders with workers, oldest first."""
    return [record.stats() for record in _records]
