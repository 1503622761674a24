"""Batches of many small tensors: a dict of 50, and a list of 64 ragged ones.

    python -m benchmarks.many_tensors [--repeats N]

Two workers. The samples exist before the first batch is asked for. Stock sends a descriptor per tensor. The floor of
the dict is the same work in-process (``num_workers=0``); the ragged list costs nothing in-process, where the samples
themselves are the batch, so its floor is a copy of its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.data

import torchcrew.data
from benchmarks import harness
from benchmarks.datasets import ManyTensors, Ragged
from benchmarks.harness import COPY, IN_PROCESS, OURS, STOCK, Claim, Row

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
        BATCH * TENSORS * 16 * 4,
        [
            Claim("no slower than the same work in-process", IN_PROCESS, at_least=1.0),
            Claim("at least 14 times faster than stock", at_least=14),
        ],
    )
    ragged = Ragged(BATCH * BATCHES)
    _add(
        bench,
        "ragged",
        "list of 64 ragged tensors, custom collate",
        ragged,
        list,
        sum(ragged[index].nbytes for index in range(len(ragged))) // BATCHES,
        [Claim("at least 40 times faster than stock", at_least=40)],
    )
    bench.finish()


def _add(
    bench: harness.Benchmark, key: str, work: str, dataset: Any, collate: Any, nbytes: int, claims: list[Claim]
) -> None:
    loaders: dict[str, Callable[[], Any]] = {
        STOCK: lambda: torch.utils.data.DataLoader(dataset, BATCH, num_workers=WORKERS, collate_fn=collate),
        OURS: lambda: torchcrew.data.DataLoader(dataset, BATCH, num_workers=WORKERS, collate_fn=collate),
        IN_PROCESS: lambda: torch.utils.data.DataLoader(dataset, BATCH, collate_fn=collate),
    }
    extra = {COPY: lambda: {"batch_s": harness.time_copy(nbytes)}}
    measured, verified = harness.run_epochs(loaders, bench.repeats, extra)
    floor = IN_PROCESS if collate is None else COPY
    bench.add(Row(key, work, "batch_s", "batch", measured, claims, floor, verified, more={"batch_bytes": nbytes}))


if __name__ == "__main__":
    main()
