"""Random collectives: every rank draws the same ones, with the values of all ranks, and knows what has to come out."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import torchcrew
from tests.collectives import oracle
from tests.collectives.ranks import all_gather_single, reduce_scatter_single

__all__ = ("play",)

#: What ends a collective later: its work, and the comparison.
Late = tuple[Any, Callable[[], bool], str]


class _Player:
    """One rank's part of a random program.

    Args:
        seed: of what is called: the same on all ranks.
        pause: how long a rank sleeps at most before some calls, in seconds.
    """

    def __init__(self, rank: int, size: int, seed: int, pause: float) -> None:
        self.draw, self.own = random.Random(seed), random.Random(f"{seed} {rank}")
        self.rank, self.size, self.pause = rank, size, pause
        self.groups = [(dist.group.WORLD, list(range(size)))]
        if size > 2:
            few = sorted(self.draw.sample(range(size), size - 1))
            self.groups.append((dist.new_group(few), few))
        self.what = ""
        self.late: list[Late] = []
        self.wrong: list[str] = []

    def play(self, count: int) -> list[str]:
        for number in range(count):
            group, members = self.draw.choice(self.groups)
            kind = self.draw.choice(_KINDS)
            self.what = f"{number}: {kind.__name__[1:]} among {members}"
            state = self.draw.getstate()
            if self.own.random() < 0.1:
                time.sleep(self.own.random() * self.pause)
            if self.rank in members:
                work, is_right = kind(self, group, members)
                self.check(self.what, work, is_right)
            self.draw.setstate(state)  # a rank that takes no part has drawn nothing
            self.draw.random()
            if self.wrong:
                return self.wrong
        self.settle()
        return self.wrong

    def check(self, what: str, work: Any, is_right: Callable[[], bool]) -> None:
        if work is not None:
            self.late.append((work, is_right, what))
            if len(self.late) > self.own.randrange(1, 4):
                self.settle()
        elif not is_right():
            self.wrong.append(what)

    def settle(self) -> None:
        for work, is_right, what in self.late:
            work.wait()
            if not is_right():
                self.wrong.append(f"{what} (asynchronous)")
        self.late.clear()

    # What is drawn ----------------------------------------------------------------------------------------------------

    def dtype(self) -> torch.dtype:
        dtype = self.draw.choice(oracle.DTYPES)
        self.what += f" of {dtype}"
        return dtype

    def count(self) -> int:
        """Mostly few elements; sometimes as many as fill some pages."""
        kind = self.draw.random()
        if kind < 0.05:
            return 0
        if kind < 0.8:
            return self.draw.randrange(1, 3000)
        return self.draw.randrange(3000, 40_000 if kind < 0.98 else 400_000)

    def seeds(self, members: list[int]) -> list[int]:
        first = self.draw.randrange(1 << 40)
        return [first + 1000 * rank for rank in members]

    def is_late(self) -> bool:
        return self.draw.random() < 0.3

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values, somewhere else: in shared memory, in a view with an offset, in every second element."""
        kind = self.own.random()
        if kind < 0.2:
            return torchcrew.share(tensor) if tensor.numel() else tensor
        if kind < 0.4:
            room = torch.zeros(tensor.numel() + 7, dtype=tensor.dtype)
            if self.own.random() < 0.5:
                room.share_memory_()
            view = room[5 : 5 + tensor.numel()]
            return view.copy_(tensor)
        if kind < 0.6:
            return torch.zeros(2 * tensor.numel(), dtype=tensor.dtype)[::2].copy_(tensor)
        return tensor


Outcome = tuple[Any, Callable[[], bool]]


def _all_reduce(it: _Player, group: Any, members: list[int]) -> Outcome:
    op, dtype, count, seeds = it.draw.choice(oracle.OPERATIONS), it.dtype(), it.count(), it.seeds(members)
    if not oracle.offers(op, dtype):
        op = "SUM"
    parts = [oracle.value(dtype, (count,), seed) for seed in seeds]
    expected = oracle.reduced(op, parts, as_torch=True)
    it.what += f" {op} of {count}"
    mine = it.placed(parts[members.index(it.rank)])
    where = mine.data_ptr()
    work = dist.all_reduce(mine, oracle.operation(op), group=group, async_op=it.is_late())
    return work, lambda: oracle.same(mine, expected) and mine.data_ptr() == where


def _reduce(it: _Player, group: Any, members: list[int]) -> Outcome:
    op, dtype, count, seeds = it.draw.choice(("SUM", "AVG")), it.dtype(), it.count(), it.seeds(members)
    root = it.draw.choice(members)
    if not oracle.offers(op, dtype) or dtype.is_complex:
        op = "SUM"
    parts = [oracle.value(dtype, (count,), seed) for seed in seeds]
    own = parts[members.index(it.rank)]
    expected = oracle.reduced(op, parts) if it.rank == root else own.clone()
    mine = it.placed(own)
    work = dist.reduce(mine, root, oracle.operation(op), group=group, async_op=it.is_late())
    return work, lambda: oracle.same(mine, expected)


def _reduce_scatter(it: _Player, group: Any, members: list[int]) -> Outcome:
    dtype, counts, seeds = it.dtype(), [it.count() for _ in members], it.seeds(members)
    place = members.index(it.rank)
    mine = [oracle.value(dtype, (count,), seeds[place] + to) for to, count in enumerate(counts)]
    expected = oracle.reduced("SUM", [oracle.value(dtype, (counts[place],), seed + place) for seed in seeds])
    out = it.placed(torch.zeros(counts[place], dtype=dtype))
    work = dist.reduce_scatter(out, mine, group=group, async_op=it.is_late())
    return work, lambda: oracle.same(out, expected)


def _reduce_scatter_single(it: _Player, group: Any, members: list[int]) -> Outcome:
    dtype, count, seeds = it.dtype(), it.count(), it.seeds(members)
    place = members.index(it.rank)
    parts = [oracle.value(dtype, (len(members) * count,), seed) for seed in seeds]
    expected = oracle.reduced("SUM", [part[place * count : (place + 1) * count] for part in parts])
    out = it.placed(torch.zeros(count, dtype=dtype))
    work = reduce_scatter_single(out, it.placed(parts[place]), group=group, async_op=it.is_late())
    return work, lambda: oracle.same(out, expected)


def _broadcast(it: _Player, group: Any, members: list[int]) -> Outcome:
    dtype, count, root, seeds = it.dtype(), it.count(), it.draw.choice(members), it.seeds(members)
    expected = oracle.value(dtype, (count,), seeds[members.index(root)])
    mine = it.placed(oracle.value(dtype, (count,), seeds[members.index(it.rank)]))
    work = dist.broadcast(mine, root, group=group, async_op=it.is_late())
    return work, lambda: oracle.same(mine, expected)


def _all_gather(it: _Player, group: Any, members: list[int]) -> Outcome:
    dtype, counts, seeds = it.dtype(), [it.count() for _ in members], it.seeds(members)
    expected = [oracle.value(dtype, (count,), seed) for count, seed in zip(counts, seeds, strict=True)]
    outs = [it.placed(torch.zeros(count, dtype=dtype)) for count in counts]
    mine = it.placed(expected[members.index(it.rank)].clone())
    work = dist.all_gather(outs, mine, group=group, async_op=it.is_late())
    return work, lambda: all(map(oracle.same, outs, expected))


def _all_gather_single(it: _Player, group: Any, members: list[int]) -> Outcome:
    dtype, count, seeds = it.dtype(), it.count(), it.seeds(members)
    parts = [oracle.value(dtype, (count,), seed) for seed in seeds]
    out = it.placed(torch.zeros(len(members) * count, dtype=dtype))
    work = all_gather_single(out, it.placed(parts[members.index(it.rank)]), group=group, async_op=it.is_late())
    return work, lambda: torch.equal(oracle.bits(out), torch.cat(list(map(oracle.bits, parts))))


def _gather(it: _Player, group: Any, members: list[int]) -> Outcome:
    dtype, count, root, seeds = it.dtype(), it.count(), it.draw.choice(members), it.seeds(members)
    expected = [oracle.value(dtype, (count,), seed) for seed in seeds]
    outs = [torch.zeros(count, dtype=dtype) for _ in members] if it.rank == root else None
    mine = it.placed(expected[members.index(it.rank)].clone())
    work = dist.gather(mine, outs, root, group=group, async_op=it.is_late())
    return work, lambda: outs is None or all(map(oracle.same, outs, expected))


def _scatter(it: _Player, group: Any, members: list[int]) -> Outcome:
    dtype, count, root, seeds = it.dtype(), it.count(), it.draw.choice(members), it.seeds(members)
    parts = [oracle.value(dtype, (count,), seed) for seed in seeds]
    out = it.placed(torch.zeros(count, dtype=dtype))
    given = [part.clone() for part in parts] if it.rank == root else None
    work = dist.scatter(out, given, root, group=group, async_op=it.is_late())
    return work, lambda: oracle.same(out, parts[members.index(it.rank)])


def _all_to_all(it: _Player, group: Any, members: list[int]) -> Outcome:
    dtype, seeds = it.dtype(), it.seeds(members)
    counts = [[it.count() for _ in members] for _ in members]
    place = members.index(it.rank)
    given = [oracle.value(dtype, (count,), seeds[place] + to) for to, count in enumerate(counts[place])]
    expected = [oracle.value(dtype, (row[place],), seed + place) for row, seed in zip(counts, seeds, strict=True)]
    outs = [torch.zeros_like(tensor) for tensor in expected]
    if it.draw.random() < 0.5:
        work = dist.all_to_all(outs, given, group=group, async_op=it.is_late())
        return work, lambda: all(map(oracle.same, outs, expected))
    out, into = torch.cat(given), torch.cat(outs)
    takes, gives = [row[place] for row in counts], counts[place]
    work = dist.all_to_all_single(into, out, takes, gives, group=group, async_op=it.is_late())
    return work, lambda: torch.equal(oracle.bits(into), torch.cat(list(map(oracle.bits, expected))))


def _barrier(it: _Player, group: Any, members: list[int]) -> Outcome:
    return dist.barrier(group, async_op=it.is_late()), lambda: True


def _objects(it: _Player, group: Any, members: list[int]) -> Outcome:
    sizes = [it.draw.randrange(1, 2000) for _ in members]
    found: list[Any] = [None] * len(members)
    dist.all_gather_object(found, "x" * sizes[members.index(it.rank)], group=group)
    return None, lambda: [len(text) for text in found] == sizes


_KINDS = (
    *([_all_reduce] * 5),
    *(_reduce, _reduce_scatter, _reduce_scatter_single, _broadcast, _all_gather, _all_gather_single),
    *(_gather, _scatter, _all_to_all, _barrier, _objects),
)


def play(rank: int, size: int, seed: int, count: int, pause: float) -> list[str]:
    """What was wrong in ``count`` random collectives; nothing after the first that was."""
    import warnings

    warnings.simplefilter("ignore")  # of complex numbers in half precision
    return _Player(rank, size, seed, pause).play(count)
