"""What the processes of `test_share` run: importable, and with few imports."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

import torchcrew


@dataclass
class Sample:
    name: str
    place: int


def graph(items: int) -> dict[str, Any]:
    """Something of everything."""
    return {
        "items": [{"id": i, "name": f"item {i}"} for i in range(items)],
        "samples": [Sample(f"sample {i}", i) for i in range(items)],
        "by_name": {f"item {i}": {"id": i} for i in range(items)},
        "pairs": {(i, str(i)): i for i in range(items)},
        "tensor": torch.arange(12.0),
        "array": np.arange(12),
        "parts": [{"row": torch.full((3,), float(i)), "place": np.array([i, -i])} for i in range(items)],
    }


def check(shared: Any, items: int) -> None:
    """Whether ``shared`` is, in values, ``share(graph(items))``."""
    wanted = graph(items)
    for name in ("items", "samples"):
        assert type(shared[name]) is torchcrew.SharedList
        assert shared[name] == wanted[name]
    for name in ("by_name", "pairs"):
        assert type(shared[name]) is torchcrew.SharedDict
        assert shared[name] == wanted[name]
    assert shared["by_name"]["item 7"] == {"id": 7}
    assert shared["items"][5:9][-1]["id"] == 8
    part = shared["parts"][items - 1]
    assert part["row"].tolist() == [items - 1.0] * 3
    assert part["place"].tolist() == [items - 1, 1 - items]


def mappings() -> int:
    """How many mappings of ours this process has."""
    return sum("memfd:torchcrew-share" in line for line in Path("/proc/self/maps").read_text().splitlines())


def use(shared: Any, items: int, answers: Any) -> None:
    """Check what came, write where one may, say how it went."""
    check(shared, items)
    assert shared["tensor"].is_shared()
    shared["tensor"][3] = -1.0
    shared["array"][4] = -2
    shared["parts"][6]["row"][0] = -3.0
    shared["parts"][6]["place"][1] = -4
    answers.put(mappings())


def inode(obj: Any) -> int:
    """Which memfd a list or dict is in."""
    records = obj._keys if isinstance(obj, torchcrew.SharedDict) else obj._records
    return os.fstat(records.buffer.fd).st_ino


def receive(queue: Any, answers: Any) -> None:
    """Take a list from a queue, and say what is in it."""
    received = queue.get(timeout=20)
    answers.put((type(received).__name__, len(received), received[-1], inode(received)))


def make(queue: Any, items: int) -> None:
    """Share, send, end."""
    queue.put(torchcrew.share(graph(items)))
    queue.close()
    queue.join_thread()


def hold(shared: Any, ready: Any) -> None:
    """Read everything, say so, and die by a signal."""
    assert len(list(shared)) == len(shared)
    ready.put(True)
    ready.close()
    ready.join_thread()
    os.kill(os.getpid(), signal.SIGKILL)


class Names(Dataset[Any]):
    """A dataset over a shared list."""

    def __init__(self, length: int) -> None:
        self.items = torchcrew.share([{"id": i, "name": f"item {i}", "x": float(i)} for i in range(length)])
        self.offsets = torchcrew.share(torch.arange(length))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        item = self.items[index]
        return {**item, "offset": self.offsets[index]}
