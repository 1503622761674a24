"""The program that `benchmarks.first_batch` starts: two loaders and their first batches.

    python -m benchmarks.first_batch_program --child ENGINE CONTEXT [PRELOAD ...]

Workers with spawn's semantics import this module, so it imports no more than it needs.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from typing import Any

import torch.utils.data

import torchcrew.data
from benchmarks.datasets import Ints

WORKERS, BATCH, BATCHES = 2, 32, 16


def main() -> None:
    engine, context, *preload = sys.argv[2:]
    if preload:
        multiprocessing.set_forkserver_preload(preload)
    make: Any = torchcrew.data.DataLoader if engine == "torchcrew" else torch.utils.data.DataLoader
    result: dict[str, Any] = {}
    received: list[Any] = []
    for moment in ("cold", "warm"):
        started = time.perf_counter()
        loader = make(Ints(BATCH * BATCHES), BATCH, num_workers=WORKERS, multiprocessing_context=context)
        iterator = iter(loader)
        received.append(next(iterator))
        result[f"{moment}_s"] = time.perf_counter() - started
        received.extend(iterator)
        del iterator
    from benchmarks.harness import digest

    print(json.dumps({**result, "digests": [digest(batch) for batch in received]}))


if __name__ == "__main__":
    main()
