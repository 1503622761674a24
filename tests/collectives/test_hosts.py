"""Groups whose ranks are on several hosts: faked ones, of two and two, in turn, and of three ranks and one."""

from __future__ import annotations

import copy
import functools
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.collectives.ranks import Failed, Ranks, run
from torchcrew.collectives.hosts import Layout
from torchcrew.errors import CollectiveMismatch, PeerDied

LAYOUTS = {"two and two": "AABB", "in turn": "ABAB", "three and one": "AAAB"}
DTYPES = (torch.float32, torch.int64, torch.bfloat16, torch.bool)
#: Elements: none, few, what gloo does not add, and what it does; and more than a page has room for.
SIZES = (0, 5, 1000, 20_000)
LARGE = 700_001
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)


def sit(host: str) -> None:
    """Be on a host that differs from the others, in groups that are made from now on."""
    os.environ.update(TORCHCREW_HOST=host, GLOO_SOCKET_IFNAME="lo")


def value(rank: int, count: int, dtype: torch.dtype = torch.float32, salt: int = 0) -> torch.Tensor:
    """What a rank has: numbers whose sums and products every dtype holds."""
    found = (torch.arange(count) + rank + salt) % 3 + 1
    return found % 2 == 0 if dtype is torch.bool else found.to(dtype)


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal in dtype, shape and bits."""
    assert found.dtype == wanted.dtype, (found.dtype, wanted.dtype)
    assert torch.equal(found, wanted), (found.flatten()[:8], wanted.flatten()[:8])


def reduced(op: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The reduction of small numbers, by float64; of truth: "any" or "all"."""
    dtype = tensors[0].dtype
    stacked = torch.stack([tensor.double() for tensor in tensors])
    wanted = {
        dist.ReduceOp.SUM: stacked.sum(0),
        dist.ReduceOp.AVG: stacked.sum(0) / len(tensors),
        dist.ReduceOp.MIN: stacked.amin(0),
        dist.ReduceOp.MAX: stacked.amax(0),
        dist.ReduceOp.PRODUCT: stacked.prod(0),
    }[op]
    return wanted.trunc().to(dtype) if dtype is torch.int64 else wanted.to(dtype)


def all_reduce(rank: int, size: int) -> None:
    """Every reduction, dtype and size; and a tensor whose elements do not lie in a row."""
    for dtype in DTYPES:
        for op in OPS:
            if dtype is torch.bool and op is dist.ReduceOp.AVG:
                continue
            for count in (*SIZES, LARGE) if op is dist.ReduceOp.SUM and dtype is torch.float32 else SIZES:
                tensor = value(rank, count, dtype)
                dist.all_reduce(tensor, op)
                same(tensor, reduced(op, [value(other, count, dtype) for other in range(size)]))
    square = value(rank, 40_000).view(200, 200)
    dist.all_reduce(square.t())
    same(square, reduced(dist.ReduceOp.SUM, [value(other, 40_000) for other in range(size)]).view(200, 200))


def other_dtypes(rank: int, size: int) -> None:
    """Those for which gloo has no arithmetic."""
    for dtype in (torch.complex64, torch.uint16, torch.float8_e4m3fn, torch.int8):
        tensor = value(rank, 50_000, dtype)
        dist.all_reduce(tensor)
        wanted = sum(value(other, 50_000).double() for other in range(size))
        assert isinstance(wanted, torch.Tensor)
        same(tensor.to(torch.complex64), wanted.to(dtype).to(torch.complex64))


def sparse(rank: int, size: int) -> None:
    """Sums of sparse tensors, with different indices."""
    tensors = [torch.sparse_coo_tensor(torch.tensor([[other, 7]]), value(other, 2), (9,)) for other in range(size)]
    dist.all_reduce(tensors[rank])
    wanted = torch.zeros(9)
    for other in range(size):
        wanted += torch.sparse_coo_tensor(torch.tensor([[other, 7]]), value(other, 2), (9,)).to_dense()
    same(tensors[rank].to_dense(), wanted)


def bits(rank: int, size: int) -> None:
    """All ranks have the same bits where the order of additions matters, and have them again."""
    torch.manual_seed(rank)
    for dtype in (torch.float32, torch.bfloat16):
        for count in (100, 300_000):
            mine = torch.randn(count).to(dtype)
            first, second = mine.clone(), mine.clone()
            dist.all_reduce(first)
            dist.all_reduce(second)
            same(first, second)
            outs = [torch.empty_like(first) for _ in range(size)]
            dist.all_gather(outs, first)
            for out in outs:
                same(out, first)


def from_a_root(rank: int, size: int) -> None:
    """broadcast, reduce, gather and scatter, with each rank as the root."""
    for root in range(size):
        for dtype in DTYPES:
            for count in SIZES:
                tensor = value(rank, count, dtype)
                dist.broadcast(tensor, root)
                same(tensor, value(root, count, dtype))
                tensor = value(rank, count, dtype)
                dist.reduce(tensor, root)
                everybody = [value(other, count, dtype) for other in range(size)]
                same(tensor, reduced(dist.ReduceOp.SUM, everybody) if rank == root else value(rank, count, dtype))
        outs = [torch.empty(999) for _ in range(size)] if rank == root else None
        dist.gather(value(rank, 999), outs, root)
        for other, out in enumerate(outs or []):
            same(out, value(other, 999))
        out = torch.empty(30, 30)
        ins = [value(root, 900, salt=other).view(30, 30).t() for other in range(size)] if rank == root else None
        dist.scatter(out, ins, root)
        same(out, value(root, 900, salt=rank).view(30, 30).t().contiguous())


def all_gather(rank: int, size: int) -> None:
    """Into a list, whose sizes may differ, and into one tensor; objects, too."""
    for dtype in DTYPES:
        for count in (*SIZES, LARGE) if dtype is torch.float32 else SIZES:
            outs = [torch.empty(count, dtype=dtype) for _ in range(size)]
            dist.all_gather(outs, value(rank, count, dtype))
            wanted = [value(other, count, dtype) for other in range(size)]
            for out, tensor in zip(outs, wanted, strict=True):
                same(out, tensor)
            into = torch.empty(size * count, dtype=dtype)
            dist.all_gather_into_tensor(into, value(rank, count, dtype))
            same(into, torch.cat(wanted))
    outs = [torch.empty(2, other).t() for other in range(size)]
    dist.all_gather(outs, value(rank, 2 * rank).view(rank, 2))
    for other, out in enumerate(outs):
        same(out, value(other, 2 * other).view(other, 2))
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": "r" * rank})
    assert found == [{"rank": "r" * other} for other in range(size)]


def reduce_scatter(rank: int, size: int) -> None:
    """From one tensor, and from a list of different sizes; what is put in stays what it is."""
    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            for count in (0, 3, 20_000):
                out, mine = torch.empty(count, dtype=dtype), value(rank, size * count, dtype)
                dist.reduce_scatter_tensor(out, mine, op)
                wanted = reduced(op, [value(other, size * count, dtype) for other in range(size)])
                same(out, wanted[rank * count : (rank + 1) * count])
                same(mine, value(rank, size * count, dtype))
    out = torch.empty(7 * rank)
    dist.reduce_scatter(out, [value(rank, 7 * other) for other in range(size)])
    same(out, reduced(dist.ReduceOp.SUM, [value(other, 7 * rank) for other in range(size)]))


def all_to_all(rank: int, size: int) -> None:
    """Of equal parts, and of others, some of which are empty."""
    out = torch.empty(size * 50)
    dist.all_to_all_single(out, value(rank, size * 50))
    same(out, torch.cat([value(other, size * 50)[rank * 50 : (rank + 1) * 50] for other in range(size)]))
    outs = [torch.empty(other * rank, dtype=torch.int64) for other in range(size)]
    dist.all_to_all(outs, [value(rank, rank * other, torch.int64, other) for other in range(size)])
    for other, tensor in enumerate(outs):
        same(tensor, value(other, other * rank, torch.int64, rank))


def asynchronous(rank: int, size: int) -> None:
    """Several at a time, in their order, with others behind them."""
    tensors = [value(rank, count) for count in (10, 30_000, 10)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    into = torch.empty(size * 10)
    works.append(dist.all_gather_into_tensor(into, tensors[0].fill_(rank), async_op=True))
    works.append(dist.barrier(async_op=True))
    for work in works:
        assert work is not None
        work.wait()
    same(tensors[1], reduced(dist.ReduceOp.SUM, [value(other, 30_000) for other in range(size)]))
    same(tensors[2], reduced(dist.ReduceOp.SUM, [value(other, 10) for other in range(size)]))


def messages(rank: int, size: int) -> None:
    """send and recv, from a rank and from anybody, on this host and another."""
    if rank == 0:
        for other in range(1, size):
            dist.send(value(0, 1000, torch.int64, other), other, tag=other)
        found = {dist.recv(torch.empty(3)) for _ in range(1, size)}
        assert found == set(range(1, size))
    else:
        tensor = torch.empty(1000, dtype=torch.int64)
        dist.recv(tensor, 0, tag=rank)
        same(tensor, value(0, 1000, torch.int64, rank))
        dist.send(torch.ones(3), 0)
    dist.barrier()  # else rank 0 takes what is sent below for what it wants from anybody
    to, by = (rank + 1) % size, (rank - 1) % size
    tensor = torch.empty(5)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, value(rank, 5), to), dist.P2POp(dist.irecv, tensor, by)])
    for work in works:
        work.wait()
    same(tensor, value(by, 5))


def subgroups(rank: int, size: int) -> None:
    """Of some ranks of one host, of one of each, and so many that gloo's groups are let go of."""
    from torchcrew.collectives.across import HostsProcessGroup

    layout = os.environ["LAYOUT"]
    for members in ([0, 1], [1, 3], [2, 3, 0], [3], [0, 1, 2, 3]):
        group = dist.new_group(members)
        if rank in members:
            assert isinstance(group, HostsProcessGroup) == (len({layout[member] for member in members}) > 1)
            tensor = value(rank, 100)
            dist.all_reduce(tensor, group=group)
            same(tensor, reduced(dist.ReduceOp.SUM, [value(member, 100) for member in members]))
            dist.broadcast(tensor.fill_(rank), members[-1], group=group)
            same(tensor, torch.full((100,), float(members[-1])))
    for _ in range(10):
        group = dist.new_group()
        dist.barrier(group=group)
        dist.destroy_process_group(group)


def training(rank: int, size: int) -> None:
    """Steps of DistributedDataParallel: as with gloo, and the same weights on all ranks."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 40))
    weights = []
    for backend in ("crew", "gloo"):
        replica = DistributedDataParallel(copy.deepcopy(model), process_group=dist.new_group(backend=backend))
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
        torch.manual_seed(rank)
        for _ in range(3):
            optimizer.zero_grad()
            replica(torch.randn(8, 20)).square().mean().backward()
            optimizer.step()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in replica.parameters()]))
    assert torch.allclose(weights[0], weights[1])
    outs = [torch.empty_like(weights[0]) for _ in range(size)]
    dist.all_gather(outs, weights[0])
    for out in outs:
        same(out, weights[0])


CHECKS: tuple[Callable[[int, int], None], ...] = (
    all_reduce,
    other_dtypes,
    sparse,
    bits,
    from_a_root,
    all_gather,
    reduce_scatter,
    all_to_all,
    asynchronous,
    messages,
    subgroups,
    training,
)


def check_all(rank: int, size: int, layout: str) -> dict[str, str]:
    """What each of `CHECKS` found wrong; ends at the first, which leaves the others' group where it was."""
    sit(layout[rank])
    os.environ["LAYOUT"] = layout
    dist.init_process_group("crew", timeout=timedelta(seconds=10))
    found = {}
    for check in CHECKS:
        try:
            check(rank, size)
        except BaseException:
            found[check.__name__] = traceback.format_exc()
            break
        found[check.__name__] = ""
    dist.destroy_process_group()
    return found


@functools.cache
def outcome(layout: str) -> list[dict[str, str]]:
    """Of the checks in each rank: they are started once for all tests."""
    return run(check_all, len(layout), layout, backend=None)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.timeout(60)
def test_collectives_across_hosts(layout: str, check: Callable[[int, int], None]) -> None:
    """Each is what it means, in every rank."""
    for rank, found in enumerate(outcome(layout)):
        assert not found.get(check.__name__, "not reached"), f"rank {rank}: {found.get(check.__name__, 'not reached')}"


def test_a_layout_keeps_the_order_of_ranks() -> None:
    """Hosts in the order of their first ranks; ranks of a host need not be neighbours."""
    layout = Layout(["B", "A", "B", "C", "A"], 4)
    assert layout.ranks == [[0, 2], [1, 4], [3]]
    assert layout.host_of == [0, 1, 0, 2, 1]
    assert layout.place_of == [0, 0, 1, 0, 1]
    assert (layout.here, layout.rank, layout.size) == (1, 4, 5)


def mistakes(rank: int, size: int, layout: str) -> float:
    """Wrong arguments and mismatches, and how long the longest wait for one was."""
    sit(layout[rank])
    group = dist.new_group(timeout=timedelta(seconds=10))
    with pytest.raises(ValueError, match="all_gather of 4 ranks"):
        dist.all_gather([torch.empty(1)], torch.ones(1), group=group)
    with pytest.raises(ValueError, match="not a reduction"):
        dist.all_reduce(torch.ones(1), dist.ReduceOp.BAND, group=group)
    dist.barrier(group)
    longest = 0.0
    for odd in range(size):
        group = dist.new_group(timeout=timedelta(seconds=10))
        begun = time.monotonic()
        with pytest.raises((CollectiveMismatch, PeerDied), match=r"all_reduce|CollectiveMismatch"):
            dist.all_reduce(torch.ones(5 if rank == odd else 7), group=group)
        longest = max(longest, time.monotonic() - begun)
        with pytest.raises(RuntimeError, match="cannot be used any more"):
            dist.barrier(group=group)
    group = dist.new_group(timeout=timedelta(seconds=10))
    begun = time.monotonic()
    # Only rank 0 sees that rank 1 sends it too much; the others learn it in what they call next.
    inputs = [torch.ones(3 if (rank, to) == (1, 0) else 2) for to in range(size)]
    if rank != 0:
        dist.all_to_all([torch.empty(2) for _ in range(size)], inputs, group=group)
    with pytest.raises((CollectiveMismatch, PeerDied)):
        dist.all_to_all([torch.empty(2) for _ in range(size)], inputs, group=group)
    return max(longest, time.monotonic() - begun)


@pytest.mark.parametrize("layout", ["AABB", "AAAB"])
def test_ranks_that_call_different_things_all_learn_it(layout: str) -> None:
    """Whichever rank it is that differs, on whichever host; nobody waits for the timeout."""
    with Ranks(mistakes, 4, layout) as ranks:
        for found in ranks.results(within=15.0):
            assert not isinstance(found, Failed), found.traceback
            assert found < 5.0


def go_on(rank: int, size: int, layout: str, call: str, timeout: float, idle: int) -> Any:
    """Collectives until one fails; rank ``idle`` stops calling them after a while, but lives."""
    sit(layout[rank])
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    tensor = torch.ones(20_000)
    outs = [torch.empty(100) for _ in range(size)]
    for number in range(10_000):
        if rank == idle and number == 20:
            time.sleep(10 * timeout)
        if call == "all_reduce":
            dist.all_reduce(tensor, group=group)
        else:
            dist.all_to_all(outs, [torch.ones(100)] * size, group=group)
        time.sleep(0.002)
    return "never failed"


@pytest.mark.parametrize("call", ["all_reduce", "all_to_all"])
@pytest.mark.parametrize("victim", [1, 2])
def test_a_killed_rank_is_missed_on_all_hosts(victim: int, call: str) -> None:
    """A leader, and a rank that is none: everybody else gets an error long before the timeout."""
    with Ranks(go_on, 4, "AABB", call, 15.0, -1) as ranks:
        time.sleep(1.5)
        killed = ranks.signal(victim, signal.SIGKILL)
        others = [rank for rank in range(4) if rank != victim]
        for found in ranks.results(*others, within=8.0):
            assert isinstance(found, Failed), found
            assert found.kind == "PeerDied", found
            assert found.at - killed < 2.0, found


@pytest.mark.parametrize("idle", [1, 2])
def test_a_rank_that_does_not_come_is_missed_on_all_hosts(idle: int) -> None:
    """All others raise about when the timeout is over; its own host names it."""
    with Ranks(go_on, 4, "AABB", "all_reduce", 2.0, idle) as ranks:
        others = [rank for rank in range(4) if rank != idle]
        found = ranks.results(*others, within=10.0)
        assert {result.kind for result in found} <= {"CollectiveTimeout", "PeerDied"}, found
        assert any(f"rank {idle}" in result.text for result in found), found
