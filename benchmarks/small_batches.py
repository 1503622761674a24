"""Pure overhead: 20,000 ints in batches of 32, with 1 and 2 workers.

    python -m benchmarks.small_batches [--repeats N]

A batch is 256 bytes, so the time is that of asking, fetching, collating, sending and receiving. The floor is the same
work in-process (``num_workers=0``), which loaders with workers can beat only where collating costs more than a message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.data

import torchcrew.data
from benchmarks import harness
from benchmarks.datasets import Ints
from benchmarks.harness import IN_PROCESS, OURS, STOCK, Claim, Row

LENGTH, BATCH = 20_000, 32
#: Workers, and how many times faster than stock ours has to be.
TARGETS = {1: 15, 2: 12}


def main() -> None:
    bench = harness.Benchmark("small_batches", str(__doc__))
    dataset = Ints(LENGTH)
    for workers, target in TARGETS.items():

        def loaders(workers: int = workers) -> dict[str, Callable[[], Any]]:
            return {
                STOCK: lambda: torch.utils.data.DataLoader(dataset, BATCH, num_workers=workers),
                OURS: lambda: torchcrew.data.DataLoader(dataset, BATCH, num_workers=workers),
                IN_PROCESS: lambda: torch.utils.data.DataLoader(dataset, BATCH),
            }

        measured, verified = harness.run_epochs(loaders(), bench.repeats)
        plural = "s" if workers > 1 else ""
        bench.add(
            Row(
                key=f"ints_{workers}",
                work=f"20,000 ints, batch 32, {workers} worker{plural}",
                metric="batch_s",
                per="batch",
                measured=measured,
                claims=[Claim(f"at least {target} times faster than stock", at_least=target)],
                floor=IN_PROCESS,
                verified=verified,
            )
        )
    bench.finish()


if __name__ == "__main__":
    main()
