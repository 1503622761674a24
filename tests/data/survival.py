"""What the survival tests and their programs share: datasets whose every byte is known, and ways to observe an end.

No pytest here: programs that run under tight limits import this too.
"""

from __future__ import annotations

import os
import re
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, default_collate

from torchcrew.crew import guardian
from torchcrew.testing import procfs

__all__ = (
    "AT_ONCE",
    "ELEMENTS",
    "MB",
    "PROGRAMS",
    "Acting",
    "Outcome",
    "Rows",
    "check",
    "environment",
    "expected",
    "outcome",
    "row",
    "worker_pids",
)

MB = 1 << 20
ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
#: Elements of a row, 4 bytes each: two rows are more than what travels inline (and more than 64 KB).
ELEMENTS = 10_000
#: Seconds within which the death of a worker must be reported. Stock's poll is 5 s.
AT_ONCE = 1.5


def environment() -> dict[str, str]:
    """What a program needs to import this module and the package of this checkout."""
    return {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}


def row(index: int, elements: int = ELEMENTS) -> torch.Tensor:
    """Sample ``index``: no two samples agree in any element."""
    return torch.arange(elements, dtype=torch.int32) + index * 1_000_003


def expected(number: int, size: int, elements: int = ELEMENTS) -> torch.Tensor:
    """Batch ``number`` of `Rows`."""
    return torch.stack([row(number * size + k, elements) for k in range(size)])


def check(batch: torch.Tensor, number: int, size: int, elements: int = ELEMENTS) -> None:
    """Compare every byte.

    Raises:
        AssertionError: it is not batch ``number``.
    """
    if not torch.equal(batch, expected(number, size, elements)):
        raise AssertionError(f"batch {number} is wrong: it begins with {batch.reshape(-1)[:4].tolist()}")


class Rows(Dataset[torch.Tensor]):
    """``length`` samples; ``seconds`` each takes."""

    def __init__(self, length: int, elements: int = ELEMENTS, seconds: float = 0.0) -> None:
        self.length, self.elements, self.seconds = length, elements, seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return row(index, self.elements)


class Acting(Rows):
    """Rows; sample ``at`` first does something."""

    def __init__(self, length: int, at: int, act: Callable[[], Any], elements: int = ELEMENTS) -> None:
        super().__init__(length, elements)
        self.at, self.act = at, act

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.at:
            self.act()
        return super().__getitem__(index)


class Stream(IterableDataset[torch.Tensor]):
    """An iterable dataset whose ``__iter__`` first does something."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.act()
        return map(row, range(8))


@dataclass
class Acted:
    """A collate function that does something at batch ``at`` of its worker."""

    act: Callable[[], Any]
    at: int = 0
    seen: int = field(default=0)

    def __call__(self, samples: list[Any]) -> Any:
        self.seen += 1
        if self.seen > self.at:
            self.act()
        return default_collate(samples)


@dataclass(frozen=True)
class Outcome:
    """How an iteration went: batches received, and the exception that ended it."""

    batches: int
    kind: str
    text: str
    seconds: float = field(compare=False)
    """From the last batch (or the beginning) to the exception or the end."""


def outcome(make: Callable[[], Any]) -> Outcome:
    """Make a loader, iterate, and drop everything; process ids and line numbers of our frames left out of the text."""
    batches = 0
    start = time.monotonic()
    try:
        for _ in make():
            batches += 1
            start = time.monotonic()
    except Exception as error:
        kind, text = type(error).__qualname__, str(error)
        # The error is in a cycle with the frame that raised it. Freed by the cyclic collector, stock's iterator finds
        # its queues finalized before itself, and waits 5 s for each worker.
        traceback.clear_frames(error.__traceback__)
    else:
        kind, text = "", ""
    text = re.sub(r"\(pid(\(s\))? ?\d+(, \d+)*\)", "(pid N)", text)
    return Outcome(batches, kind, re.sub(r"0x[0-9a-f]+", "0xN", text), time.monotonic() - start)


def worker_pids() -> list[int]:
    """Children of this process that are neither its guardian nor anything that was exec'd for good."""
    helpers = ("guardian_main", "resource_tracker", "zygote_main", "forkserver")
    own = guardian.pid()
    return [
        info.pid
        for info in procfs.descendants(os.getpid())
        if info.parent == os.getpid()
        and info.pid != own
        and not info.is_zombie
        and not any(name in info.command for name in helpers)
    ]
