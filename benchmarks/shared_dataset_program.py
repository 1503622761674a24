"""The program that `benchmarks.shared_dataset` starts: a list of dicts in a dataset, and what its workers weigh.

    python -m benchmarks.shared_dataset_program --child SHARED CONTEXT ITEMS

Spawned workers import this module, so it imports no more than it needs.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.utils.data

import torchcrew.data

WORKERS, BATCH, EPOCHS = 4, 1000, 3


class Rows(torch.utils.data.Dataset[Any]):
    """``dataset[i]`` is item ``i`` of a list."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def make_items(count: int) -> list[dict[str, Any]]:
    """The annotations of a detection data set, as a JSON file would bring them."""
    return [
        {
            "id": i,
            "path": f"images/train/{i:09d}.jpg",
            "label": f"class {i * 7 % 1000}",
            "width": 480 + i % 300,
            "height": 360 + i % 301,
            "score": i / count,
        }
        for i in range(count)
    ]


def checksum(rows: list[Any]) -> torch.Tensor:
    """A batch, made small: how many rows, and a checksum of all that is in them."""
    return torch.tensor([len(rows), zlib.crc32(repr(rows).encode())])


def weigh(pids: list[int]) -> dict[str, float]:
    """Bytes of a worker, on average: alone its own (USS), and with its part of what is shared (PSS)."""
    uss = pss = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, kilobytes, *_ = line.split()
            pss += int(kilobytes) << 10 if name == "Pss:" else 0
            uss += int(kilobytes) << 10 if name in ("Private_Clean:", "Private_Dirty:") else 0
    return {"uss_bytes": uss / len(pids), "pss_bytes": pss / len(pids)}


def load(make: Any, dataset: Any, context: str) -> Any:
    generator = torch.Generator().manual_seed(3)
    return make(
        dataset,
        BATCH,
        shuffle=True,
        generator=generator,
        num_workers=WORKERS,
        multiprocessing_context=context,
        persistent_workers=True,
        collate_fn=checksum,
    )


def main() -> None:
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than cores: on purpose
    shared, context, count = sys.argv[2] == "torchcrew", sys.argv[3], int(sys.argv[4])
    make: Any = torchcrew.data.DataLoader if shared else torch.utils.data.DataLoader
    items = make_items(count)
    started = time.perf_counter()
    rows: Any = torchcrew.share(items) if shared else items
    share_s = time.perf_counter() - started
    loader = load(make, Rows(rows), context)
    iterator = iter(loader)
    batches = [next(iterator)]
    first_s = time.perf_counter() - started
    batches.extend(iterator)
    for _ in range(EPOCHS - 1):
        batches.extend(loader)
    total_s = time.perf_counter() - started
    weight = weigh([worker.pid for worker in iterator._workers])
    result = {"first_s": first_s, "share_s": share_s, "total_s": total_s}
    del iterator, loader
    # What a worker weighs that has next to nothing to hold.
    empty = load(make, Rows([{"id": 0}] * BATCH * WORKERS), context)
    iterator = iter(empty)
    next(iterator)
    bare = weigh([worker.pid for worker in iterator._workers])
    list(iterator)
    for name, value in weight.items():
        result[name] = max(0.0, value - bare[name])
        result[f"bare_{name}"] = bare[name]
    print(json.dumps({**result, "digests": [str(batch.tolist()) for batch in batches]}))


if __name__ == "__main__":
    main()
