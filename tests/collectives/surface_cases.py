"""What programs do with a group, and with what tensors; each function looks at what comes out."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

import torchcrew
from tests.collectives import oracle
from tests.collectives.ranks import all_gather_single, reduce_scatter_single
from torchcrew.testing import leaks

#: Elements of float32: one turn, and several pages.
FEW, MANY = 100, 600_001


def total(size: int) -> float:
    """Of 1 and as many ranks."""
    return size * (size + 1) / 2


def numpy_memory(rank: int, size: int) -> None:
    """An array sees what is reduced through a tensor of it."""
    for count in (FEW, MANY):
        array = np.full(count, rank + 1.0, dtype=np.float32)
        dist.all_reduce(torch.from_numpy(array))
        assert (array == total(size)).all()
        dist.broadcast(torch.from_numpy(array[10:20]), 0)
        every_second = np.full(2 * count, rank + 1.0)
        dist.all_reduce(torch.from_numpy(every_second[::2]))
        assert (every_second[::2] == total(size)).all()
        assert (every_second[1::2] == rank + 1).all()


def shapes(rank: int, size: int) -> None:
    """Any shape and layout in memory; what lies between the elements is left alone."""
    for shape in ((), (1,), (0,), (3, 0, 2), (2, 3, 5), (MANY,)):
        tensor = torch.full(shape, rank + 1.0)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full(shape, total(size)))
    matrix = torch.arange(12.0).view(3, 4) * (rank + 1)
    dist.all_reduce(matrix.t())
    assert torch.equal(matrix, torch.arange(12.0).view(3, 4) * total(size))
    columns = torch.zeros(1000, 400)
    columns[:, 7:300] = rank + 1
    dist.all_reduce(columns[:, 7:300])
    assert (columns[:, 7:300] == total(size)).all()
    assert (columns[:, :7] == 0).all()
    assert (columns[:, 300:] == 0).all()
    last = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    dist.all_reduce(last)
    assert (last == size).all()
    whole = torch.full((size, 3), float(rank))
    outs = list(torch.empty(4, size).t())  # rows with a stride
    dist.all_gather(outs, torch.full((4,), float(rank)))
    assert [out.tolist() for out in outs] == [[float(source)] * 4 for source in range(size)]
    dist.all_to_all_single(whole, whole.clone())
    assert torch.equal(whole, torch.arange(float(size))[:, None].expand(size, 3))


def autograd(rank: int, size: int) -> None:
    """Parameters, leaves that want a gradient, views of them, and tensors of inference mode are written as by gloo."""
    parameter = torch.nn.Parameter(torch.full((4,), rank + 1.0))
    dist.broadcast(parameter, 0)
    assert parameter.tolist() == [1.0] * 4
    dist.all_reduce(parameter[1:])
    assert parameter.tolist() == [1.0] + [float(size)] * 3
    assert parameter.requires_grad
    assert parameter.is_leaf
    with torch.inference_mode():
        frozen = torch.full((FEW,), rank + 1.0)
    dist.all_reduce(frozen)
    assert frozen.is_inference()
    assert (frozen == total(size)).all()
    with torch.inference_mode():
        ordinary = parameter.detach()
        dist.all_reduce(ordinary)
        dist.all_reduce(frozen)
    out = torch.empty(size * FEW)
    all_gather_single(out, torch.full((FEW,), float(rank), requires_grad=True))
    assert not out.requires_grad
    x = torch.full((3,), rank + 1.0, requires_grad=True)
    y = x * 2
    dist.all_reduce(y)
    assert y.tolist() == [2 * total(size)] * 3


def negated(rank: int, size: int) -> None:
    """Views that torch computes when somebody looks: torch itself refuses conjugated ones, negated ones are copied."""
    given = oracle.value(torch.complex64, (50,), rank)
    for view in (given.imag, given.conj().imag):
        expected = [view.clone()] * size
        mine = [torch.empty_like(view.clone()) for _ in range(size)]
        dist.all_gather_object(expected, view.clone())
        dist.all_gather(mine, view)
        assert all(map(oracle.same, mine, expected))
        total = oracle.reduced("SUM", expected)
        dist.all_reduce(view)
        assert oracle.same(view.clone(), total)


def types(rank: int, size: int) -> None:
    """Every dtype is moved, and reduced if it has numbers."""
    warnings.simplefilter("ignore")
    for dtype in oracle.DTYPES:
        for count in (33, 70_001):
            parts = [oracle.value(dtype, (count,), seed) for seed in range(size)]
            mine = parts[rank].clone()
            dist.all_reduce(mine)
            assert oracle.same(mine, oracle.reduced("SUM", parts)), dtype
            mine = parts[rank].clone()
            dist.broadcast(mine, size - 1)
            assert oracle.same(mine, parts[-1]), dtype
    for dtype in (torch.bits8, torch.float8_e8m0fnu, torch.uint4, torch.quint8):
        whole = torch.full((40,), rank, dtype=torch.uint8)
        row = torch.empty(0)
        try:
            row = whole.view(dtype)
        except (RuntimeError, TypeError):
            continue
        dist.broadcast(row, size - 1)
        assert (whole == size - 1).all(), dtype


def shared(rank: int, size: int) -> None:
    """Tensors in shared memory are reduced where they lie, in every mixture, and stay where they are."""
    for of_whom in ("all", "some", "none"):
        for offset in (0, 3):
            is_shared = of_whom == "all" or (of_whom == "some" and rank % 2 == 0)
            room = torch.full((MANY + 10,), -1.0)
            if is_shared and offset:
                room.share_memory_()
            elif is_shared:
                room = torchcrew.share(room)
            mine = room[offset : offset + MANY]
            where = mine.data_ptr()
            for dtype in (torch.float32, torch.int32):
                typed = mine.view(dtype)
                for turn in range(3):
                    typed.fill_(rank + turn)
                    dist.all_reduce(typed)
                    assert (typed == sum(range(turn, size + turn))).all(), (of_whom, offset, dtype)
            assert mine.data_ptr() == where
            assert (room[:offset] == -1).all()
            assert (room[offset + MANY :] == -1).all()
            assert room.is_shared() == is_shared
    many = [torchcrew.share(torch.full((20_000,), rank + 1.0)) for _ in range(50)]  # more than mappings are kept
    for _ in range(2):
        for tensor in many:
            tensor.fill_(rank + 1.0)
            dist.all_reduce(tensor)
            assert (tensor == total(size)).all()


def short_lived(rank: int, size: int) -> None:
    """Shared memory whose number is used again is not taken for what was there before."""
    for turn in range(60):
        tensor = torchcrew.share(torch.full((10_000 + 1000 * (turn % 3),), float(rank + turn)))
        dist.all_reduce(tensor)
        assert (tensor == sum(range(turn, size + turn))).all()
        del tensor


def objects(rank: int, size: int) -> None:
    """Object collectives."""
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank, "text": "x" * rank})
    assert found == [{"rank": other, "text": "x" * other} for other in range(size)]
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(("from", rank), gathered, 0)
    assert gathered is None or gathered == [("from", other) for other in range(size)]
    told: list[Any] = ["the", {"same": 1}] if rank == size - 1 else [None, None]
    dist.broadcast_object_list(told, size - 1)
    assert told == ["the", {"same": 1}]
    given: list[Any] = [None]
    dist.scatter_object_list(given, [f"for {other}" for other in range(size)] if rank == 0 else None, 0)
    assert given == [f"for {rank}"]


def asynchronous(rank: int, size: int) -> None:
    """Works end in their order, and may be waited for in any; synchronous calls come behind them."""
    tensors = [torch.full((count,), rank + 1.0) for count in (FEW, MANY, 0, FEW, MANY)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    last = torch.full((FEW,), rank + 1.0)
    dist.all_reduce(last)
    assert (last == total(size)).all()
    assert all(work.is_completed() for work in works)
    for work, tensor in reversed(list(zip(works, tensors, strict=True))):
        assert work.wait()
        assert (tensor == total(size)).all()
    tensor = torch.full((MANY,), rank + 1.0)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    assert (future.wait()[0] == total(size)).all()
    chained = dist.all_reduce(tensor.fill_(1), async_op=True).get_future().then(lambda done: done.value()[0] / size)
    assert (chained.wait() == 1).all()
    assert dist.barrier(async_op=True).wait()


def coalesced(rank: int, size: int) -> None:
    """Several collectives in one call."""
    tensors = [torch.full((count,), rank + 1.0) for count in (FEW, MANY, 3)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert all((tensor == total(size)).all() for tensor in tensors)
    outs = [torch.empty(size * count) for count in (FEW, 3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for out in outs:
            all_gather_single(out, torch.full((out.numel() // size,), float(rank)))
    manager.wait()
    for out in outs:
        assert torch.equal(out, torch.arange(float(size)).repeat_interleave(out.numel() // size))
    parts = [torch.empty(count) for count in (FEW, 3)]
    with dist._coalescing_manager():
        for part in parts:
            reduce_scatter_single(part, torch.full((size * part.numel(),), rank + 1.0))
    assert all((part == total(size)).all() for part in parts)
    lists = [[torch.empty(FEW), torch.empty(3, 2)] for _ in range(size)]  # of each rank, what it gives
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_gather_coalesced(lists, [torch.full_like(tensor, rank + 1.0) for tensor in lists[0]])
    assert all((tensor == place + 1).all() for place, tensors in enumerate(lists) for tensor in tensors)
    many = [torch.full((3,), float(rank)) for _ in range(3)]
    functional_sum = functional.all_reduce_coalesced(many, "sum", dist.group.WORLD)
    assert all((tensor == sum(range(size))).all() for tensor in functional_sum)


def functions(rank: int, size: int) -> None:
    """Functional collectives, and their gradients."""
    world = dist.group.WORLD
    mine = torch.full((size, 2), rank + 1.0)
    assert (functional.all_reduce(mine, "sum", world) == total(size)).all()
    assert (mine == rank + 1).all()
    gathered = functional.all_gather_tensor(mine, 0, world)
    assert gathered.shape == (size * size, 2)
    assert torch.equal(gathered[::size, 0] + 0, torch.arange(1.0, size + 1))
    assert functional.all_gather_tensor(mine, 1, world).shape == (size, 2 * size)
    scattered = functional.reduce_scatter_tensor(mine, "sum", 0, world)
    assert torch.equal(scattered + 0, torch.full((1, 2), total(size)))
    swapped = functional.all_to_all_single(mine, None, None, world)
    assert torch.equal(swapped[:, 0] + 0, torch.arange(1.0, size + 1))
    assert (functional.broadcast(mine, 0, world) == 1).all()
    assert (functional.all_reduce(torch.tensor(rank), "max", world) == size - 1).all()


def groups(rank: int, size: int) -> None:
    """Groups of few, of one, of the same ranks, several at a time, and what calls of each return."""
    pairs = [dist.new_group([first, first + 1]) for first in range(size - 1)]
    for first, group in enumerate(pairs):
        tensor = torch.full((FEW,), rank + 1.0)
        if rank in (first, first + 1):
            assert dist.get_rank(group) == rank - first
            assert dist.get_world_size(group) == 2
            dist.all_reduce(tensor, group=group)
            assert (tensor == 2 * first + 3).all()
            dist.broadcast(tensor.fill_(rank), first + 1, group=group)
            assert (tensor == first + 1).all()
        else:
            assert group == dist.GroupMember.NON_GROUP_MEMBER
    alone, own = dist.new_subgroups(1)[0], torch.full((3,), float(rank))
    dist.all_reduce(own, group=alone)
    assert (own == rank).all()
    other = dist.new_group(timeout=timedelta(seconds=3), group_desc="the same ranks")
    assert other.group_desc == "the same ranks"
    works = []
    tensors = [torch.ones(MANY) for _ in range(4)]
    for number, tensor in enumerate(tensors):
        works.append(dist.all_reduce(tensor, group=other if number % 2 else None, async_op=True))
    for work, tensor in zip(works, tensors, strict=True):
        work.wait()
        assert (tensor == size).all()
    assert dist.get_backend(other) == "crew"
    dist.destroy_process_group(other)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert (tensor == size).all()


def mesh(rank: int, size: int) -> None:
    """A device mesh of two dimensions."""
    grid = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("outer", "inner"))
    tensor = torch.full((FEW,), float(rank))
    dist.all_reduce(tensor, group=grid.get_group("inner"))
    assert (tensor == 4 * (rank // 2) + 1).all()
    row = functional.all_reduce(torch.full((3,), 1.0), "sum", (grid, 0))
    assert (row == size // 2).all()


def without_leaks(rank: int, size: int) -> list[str]:
    """What is left of a group when it is destroyed."""
    warm = dist.new_group()
    dist.all_reduce(torch.ones(3), group=warm)
    dist.all_reduce(torch.ones(3), group=warm, async_op=True).wait()
    dist.destroy_process_group(warm)
    del warm
    before = leaks.snapshot()
    group = dist.new_group()
    room = torchcrew.share(torch.ones(MANY))
    for tensor in (torch.ones(FEW), torch.ones(MANY), room):
        dist.all_reduce(tensor, group=group)
        dist.all_reduce(tensor, group=group, async_op=True).wait()
    dist.barrier()
    dist.destroy_process_group(group)
    del group, room, tensor
    return leaks.settle(before, 3.0)


def everything_destroyed(rank: int, size: int) -> list[str]:
    """What is left when the default group is destroyed: no memory of it, descriptor, or thread."""
    dist.all_reduce(torch.ones(MANY), async_op=True).wait()
    pids: list[Any] = [None] * size
    dist.all_gather_object(pids, os.getpid())
    dist.barrier()
    dist.destroy_process_group()
    state = leaks.snapshot()
    watched = tuple(f"of pid {pid}" for pid in pids)
    found = [str(it) for it in state.descriptors if "torchcrew-group" in it.target or str(it).endswith(watched)]
    found += [it.name for it in state.mappings if "torchcrew-group" in it.name]
    return found + [it.name for it in state.threads if "torchcrew-group" in it.name]


def idle(rank: int, size: int) -> float:
    """The processor time of a rank, in seconds, that waits a second for others."""
    import time

    dist.barrier()
    if rank == 0:
        time.sleep(1.2)
        dist.barrier()
        return 0.0
    time.sleep(0.2)  # until what torch's own threads spin for is over
    begin = time.process_time()  # not by ticks of 10 ms, in which it wakes up
    dist.barrier()
    return time.process_time() - begin
