"""Epochs of 8 batches with persistent workers: what beginning and ending an epoch costs.

    python -m benchmarks.tiny_epochs [--repeats N]

Two workers, ints in batches of 32. A repeat is one loader with 60 epochs, of which the first, which starts the workers,
is not counted. The floor is the same work in-process.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch.utils.data

import torchcrew.data
from benchmarks import harness
from benchmarks.datasets import Ints
from benchmarks.harness import IN_PROCESS, OURS, STOCK, Claim, Measurement, Row

WORKERS = 2
BATCH, BATCHES, EPOCHS = 32, 8, 60


def main() -> None:
    bench = harness.Benchmark("tiny_epochs", str(__doc__))
    dataset = Ints(BATCH * BATCHES)
    loaders: dict[str, Callable[[], Iterable[Any]]] = {
        STOCK: lambda: torch.utils.data.DataLoader(dataset, BATCH, num_workers=WORKERS, persistent_workers=True),
        OURS: lambda: torchcrew.data.DataLoader(dataset, BATCH, num_workers=WORKERS, persistent_workers=True),
        IN_PROCESS: lambda: torch.utils.data.DataLoader(dataset, BATCH),
    }
    before = harness.verify(loaders, epochs=3)
    measured = harness.alternate({name: partial(_epochs, make) for name, make in loaders.items()}, bench.repeats)
    bench.add(
        Row(
            key="tiny_epochs",
            work=f"epochs of {BATCHES} batches, persistent workers",
            metric="epoch_s",
            per="epoch",
            measured=measured,
            claims=[Claim("at least 2 times faster than stock", at_least=2)],
            floor=IN_PROCESS,
            verified=before,
        )
    )
    bench.finish()


def _epochs(make: Callable[[], Iterable[Any]]) -> Measurement:
    """The median epoch of one loader."""
    loader = make()
    gc.collect()
    seconds = []
    for _ in range(EPOCHS):
        started = time.perf_counter()
        for _batch in loader:
            pass
        seconds.append(time.perf_counter() - started)
    return {"epoch_s": statistics.median(seconds[1:])}


if __name__ == "__main__":
    main()
