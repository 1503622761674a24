"""The same calls in a group `crew` and in one of gloo, in the same ranks: what differs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.collectives import oracle
from tests.collectives.ranks import all_gather_single, reduce_scatter_single

#: Elements: below and above what one turn carries, and several pages.
SIZES = (1, 7, 20_000, 700_003)
#: What gloo has arithmetic for.
GLOO = (
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)


def reductions(rank: int, size: int) -> list[str]:
    """all_reduce, reduce and reduce_scatter of every type and operation that gloo has."""
    gloo, differences = dist.new_group(backend="gloo"), []
    for dtype in GLOO:
        for op in oracle.OPERATIONS:
            if not oracle.offers(op, dtype) or (op == "AVG" and not dtype.is_floating_point):
                continue
            for count in SIZES if dtype is torch.float32 else SIZES[1:3]:
                given = oracle.value(dtype, (count,), 100 * rank + count)
                for name, call in _REDUCTIONS.items():
                    results = [call(given.clone(), oracle.operation(op), group, rank, size) for group in (None, gloo)]
                    if not oracle.same(*results):
                        differences.append(f"{name} {op} of {count} {dtype}")
    return differences


def _all_reduce(tensor: torch.Tensor, op: Any, group: Any, rank: int, size: int) -> torch.Tensor:
    dist.all_reduce(tensor, op, group=group)
    return tensor


def _reduce(tensor: torch.Tensor, op: Any, group: Any, rank: int, size: int) -> torch.Tensor:
    dist.reduce(tensor, size - 1, op, group=group)
    return tensor if rank == size - 1 else tensor[:0]  # gloo uses the others' tensors for itself


def _reduce_scatter(tensor: torch.Tensor, op: Any, group: Any, rank: int, size: int) -> torch.Tensor:
    out = torch.empty_like(tensor)
    reduce_scatter_single(out, torch.cat([tensor] * size), op, group=group)
    return out


_REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
}


def copies(rank: int, size: int) -> list[str]:
    """What moves bytes, of every type that gloo moves."""
    gloo, differences = dist.new_group(backend="gloo"), []
    for dtype in GLOO:
        for shape in ((), (0,), (5, 3), (200_001,)) if dtype is torch.float32 else ((5, 3),):
            for name, call in _COPIES.items():
                if not shape and name in ("all_to_all_single", "all_gather_into_tensor"):
                    continue
                if name in ("gather", "scatter") and (dtype is torch.bool or dtype.is_complex):
                    continue  # gloo cannot
                mine = [oracle.value(dtype, shape, 1000 * rank + part) for part in range(size)]
                one, other = (call([it.clone() for it in mine], group, rank, size) for group in (None, gloo))
                if len(one) != len(other) or not all(map(oracle.same, one, other)):
                    differences.append(f"{name} of {shape} {dtype}")
    return differences


Parts = list[torch.Tensor]


def _broadcast(mine: Parts, group: Any, rank: int, size: int) -> Parts:
    dist.broadcast(mine[0], size - 1, group=group)
    return mine[:1]


def _all_gather(mine: Parts, group: Any, rank: int, size: int) -> Parts:
    outs = [torch.empty_like(mine[0]) for _ in range(size)]
    dist.all_gather(outs, mine[0], group=group)
    return outs


def _all_gather_into_tensor(mine: Parts, group: Any, rank: int, size: int) -> Parts:
    out = torch.empty(size * mine[0].shape[0], *mine[0].shape[1:], dtype=mine[0].dtype)
    all_gather_single(out, mine[0], group=group)
    return [out]


def _gather(mine: Parts, group: Any, rank: int, size: int) -> Parts:
    outs = [torch.empty_like(mine[0]) for _ in range(size)]
    dist.gather(mine[0], outs if rank == 0 else None, 0, group=group)
    return outs if rank == 0 else []


def _scatter(mine: Parts, group: Any, rank: int, size: int) -> Parts:
    out = torch.empty_like(mine[0])
    dist.scatter(out, mine if rank == size - 1 else None, size - 1, group=group)
    return [out]


def _all_to_all_single(mine: Parts, group: Any, rank: int, size: int) -> Parts:
    given = torch.cat(mine)
    out = torch.empty_like(given)
    dist.all_to_all_single(out, given, group=group)
    return [out]


_COPIES: dict[str, Callable[..., Parts]] = {
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all_single": _all_to_all_single,
}


def errors(rank: int, size: int) -> list[tuple[str, str, str]]:
    """What both backends say of calls that cannot be meant: the call, and how each refuses it."""
    warnings.simplefilter("ignore")
    gloo = dist.new_group(backend="gloo")
    found = []
    for name, call in _WRONG.items():
        told = []
        for group in (None, gloo):
            try:
                call(group, rank, size)
                told.append("done")
            except Exception as error:
                told.append(f"{type(error).__name__}: {error}")
        found.append((name, told[0], told[1]))
    # Nothing of it has broken the group.
    one = torch.ones(2)
    dist.all_reduce(one)
    found.append(("after all of it", str(one.tolist()), str([float(size)] * 2)))
    return found


def _floats(count: int = 4) -> torch.Tensor:
    return torch.ones(count)


#: Refused by torch itself: the same exception, with the same words.
_WRONG: dict[str, Callable[..., Any]] = {
    "no tensor": lambda group, rank, size: dist.all_reduce([1.0], group=group),
    "bits of complex": lambda group, rank, size: dist.all_reduce(
        torch.ones(2, dtype=torch.complex64), dist.ReduceOp.BAND, group=group
    ),
    "two types": lambda group, rank, size: dist.all_gather(
        [_floats().double() for _ in range(size)], _floats(), group=group
    ),
    "gather without outputs": lambda group, rank, size: dist.gather(_floats(), None, rank, group=group),
    "outputs that are no list": lambda group, rank, size: dist.all_gather(_floats(), _floats(), group=group),
    # Refused by the backends, each in its own words.
    "root that is none": lambda group, rank, size: dist.broadcast(_floats(), 99, group=group),
    "bits of floats": lambda group, rank, size: dist.all_reduce(_floats(), dist.ReduceOp.BAND, group=group),
    "truth's average": lambda group, rank, size: dist.all_reduce(
        torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG, group=group
    ),
    "too few outputs": lambda group, rank, size: dist.all_gather([_floats()] * (size - 1), _floats(), group=group),
    "an output too large": lambda group, rank, size: all_gather_single(_floats(4 * size + 1), _floats(), group=group),
    "splits that do not add up": lambda group, rank, size: dist.all_to_all_single(
        _floats(), _floats(), [1] * size, [3] * size, group=group
    ),
}
