"""Calls of which one rank's differ from the others'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

MANY = 300_000


def _odd(rank: int) -> bool:
    return rank == 1


CALLS: dict[str, Callable[[int, int], Any]] = {
    "another collective": lambda rank, size: dist.barrier() if _odd(rank) else dist.all_reduce(torch.ones(3)),
    "another size": lambda rank, size: dist.all_reduce(torch.ones(4 if _odd(rank) else 3)),
    "another size, by far": lambda rank, size: dist.all_reduce(torch.ones(MANY if _odd(rank) else 3)),
    "another type": lambda rank, size: dist.all_reduce(
        torch.ones(MANY, dtype=torch.int32 if _odd(rank) else torch.float32)
    ),
    "another operation": lambda rank, size: dist.all_reduce(
        torch.ones(3), dist.ReduceOp.MAX if _odd(rank) else dist.ReduceOp.SUM
    ),
    "another root": lambda rank, size: dist.broadcast(torch.ones(3), 1 if _odd(rank) else 0),
    "broadcast for reduce": lambda rank, size: (
        dist.broadcast(torch.ones(MANY), 0) if _odd(rank) else dist.reduce(torch.ones(MANY), 0)
    ),
    "asynchronous": lambda rank, size: dist.all_reduce(torch.ones(4 if _odd(rank) else 3), async_op=True).wait(),
}


def mismatches(rank: int, size: int) -> list[tuple[str, str, str, bool]]:
    """What each call raises, and whether the group goes on, with what was called with untouched."""
    found = []
    for name, call in CALLS.items():
        error: BaseException | None = None
        try:
            call(rank, size)
        except BaseException as raised:
            error = raised
        tensor = torch.full((MANY,), rank + 1.0)
        dist.all_reduce(tensor)
        goes_on = bool((tensor == size * (size + 1) / 2).all())
        found.append((name, type(error).__name__, str(error), goes_on))
    return found


def untouched(rank: int, size: int) -> list[float]:
    """A tensor after a mismatch."""
    tensor = torch.full((5 if _odd(rank) else MANY,), float(rank))
    try:
        dist.all_reduce(tensor)
    except RuntimeError:
        return [tensor.min().item(), tensor.max().item()]
    return []


def a_part_of_another_size(rank: int, size: int) -> str:
    """What only the receiver can see: it says so, and the group ends for all."""
    outs = [torch.empty(3) for _ in range(size)]
    try:
        dist.all_gather(outs, torch.ones(4 if rank == 1 else 3))
        dist.barrier()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
