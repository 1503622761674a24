"""Batches of many small tensors: a dict of 50, and a list of 64 ragged ones.

    python -m benchmarks.many_tensors [--repeats N]

Two workers. The samples exist before the first batch is asked for. Stock sends a descriptor per tensor; the floor is
the same work in-process (``num_workers=0``), where nothing is sent at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.data

import torchcrew.data
from benchmarks import harness
from benchmarks.datasets import ManyTensors, Ragged
from benchmarks.harness import IN_PROCESS, OURS, STOCK, Claim, Row

WORKERS = 2
BATCH, BATCHES = 64, 64
TENSORS = 50


def main() -> None:
    bench = harness.Benchmark("many_tensors", str(__doc__))
    _add(
        bench,
        "dict",
        "dict of 50 small tensors, batch 64",
        ManyTensors(BATCH * BATCHES, TENSORS),
        None,
        [
            Claim("no slower than the same work in-process", IN_PROCESS, at_least=1.0),
            Claim("at least 14 times faster than stock", at_least=14),
        ],
    )
    _add(
        bench,
        "ragged",
        "list of 64 ragged tensors, custom collate",
        Ragged(BATCH * BATCHES),
        list,
        [Claim("at least 40 times faster than stock", at_least=40)],
    )
    bench.finish()


def _add(bench: harness.Benchmark, key: str, work: str, dataset: Any, collate: Any, claims: list[Claim]) -> None:
    loaders: dict[str, Callable[[], Any]] = {
        STOCK: lambda: torch.utils.data.DataLoader(dataset, BATCH, num_workers=WORKERS, collate_fn=collate),
        OURS: lambda: torchcrew.data.DataLoader(dataset, BATCH, num_workers=WORKERS, collate_fn=collate),
        IN_PROCESS: lambda: torch.utils.data.DataLoader(dataset, BATCH, collate_fn=collate),
    }
    measured, verified = harness.run_epochs(loaders, bench.repeats)
    bench.add(Row(key, work, "batch_s", "batch", measured, claims, IN_PROCESS, verified))


if __name__ == "__main__":
    main()
