"""What the ranks of `test_recorder.py` run: importable by name in every process."""

from __future__ import annotations

import random
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import all_reduce  # a program that has the name before anything is recorded
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from torchcrew.collectives import register
from torchcrew.launcher import recorder
from torchcrew.launcher.ledger import Ledger, Phase

TIMEOUT = timedelta(seconds=15)


def be_rank(rank: int, size: int, ledger: Ledger, case: str, *args: Any) -> None:
    """Run one of the functions below, recorded, with a group ready: of gloo, or as in "crew:threads"."""
    backend, _, case = case.rpartition(":")
    torch.set_num_threads(1)
    ledger.enter(rank, Phase.RUNNING)
    recorder.install(ledger, rank, 0)
    warnings.filterwarnings("error", module="torchcrew")
    register()
    dist.init_process_group(backend or "gloo", rank=rank, world_size=size, timeout=TIMEOUT)
    globals()[case](rank, size, ledger, *args)
    dist.destroy_process_group()
    ledger.enter(rank, Phase.RETURNED)


# Equal programs: none of these may raise.


def random_sequence(rank: int, size: int, ledger: Ledger, seed: int, count: int) -> None:
    """Every collective in every group in an order that is the same everywhere."""
    groups = [(None, range(size))]
    for members in ([0, 1], [size - 1, 0], list(range(size)), [size - 1]):
        group = dist.new_group(members, timeout=TIMEOUT)
        groups.append((group, sorted(members)))
    common, own = random.Random(seed), random.Random(f"{seed} {rank}")
    names = [*OPERATIONS, *OPERATIONS]
    while len(names) < count:
        names.append(common.choice(list(OPERATIONS)))
    for name in names:
        group, ranks = common.choice(groups)
        root, dtype, elements = common.choice(ranks), common.choice(DTYPES), common.choice([0, 1, 7, 1000])
        op = common.choice([dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT])
        if own.random() < 0.05:
            time.sleep(own.random() * 0.01)
        if rank in ranks:
            OPERATIONS[name](rank, ranks, group, root, torch.ones(elements, dtype=dtype), op)
    dist.barrier()


DTYPES = (torch.float32, torch.float64, torch.int64, torch.uint8)


def unsupported(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """A backend that does not have it says so in all ranks."""
    try:
        function(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        if type(error).__name__ == "CollectiveMismatch":
            raise


def _scatter(rank: int, ranks: Any, group: Any, root: int, x: torch.Tensor, op: Any) -> None:
    dist.scatter(x, [x.clone() for _ in ranks] if rank == root else None, root, group)


def _gather(rank: int, ranks: Any, group: Any, root: int, x: torch.Tensor, op: Any) -> None:
    dist.gather(x, [x.clone() for _ in ranks] if rank == root else None, group=group, dst=root)


def _objects_to_one(rank: int, ranks: Any, group: Any, root: int, x: torch.Tensor, op: Any) -> None:
    dist.gather_object({"rank": rank}, [None for _ in ranks] if rank == root else None, dst=root, group=group)


def _objects_from_one(rank: int, ranks: Any, group: Any, root: int, x: torch.Tensor, op: Any) -> None:
    out: list[Any] = [None]
    dist.scatter_object_list(out, list(ranks) if rank == root else None, src=root, group=group)
    assert out == [rank]


def _point_to_point(rank: int, ranks: Any, group: Any, root: int, x: torch.Tensor, op: Any) -> None:
    first, *_, last = (*ranks, ranks[-1])
    if first != last and rank == first:
        dist.send(x, last, group)
        dist.send_object_list(["a"], last, group)
    elif first != last and rank == last:
        dist.recv(x, first, group=group)
        objects = [None]
        dist.recv_object_list(objects, first, group=group)
        assert objects == ["a"]


def _uneven_exchange(rank: int, ranks: Any, group: Any, root: int, x: torch.Tensor, op: Any) -> None:
    mine = list(ranks).index(rank) + 1
    got = torch.empty(sum(range(1, len(ranks) + 1)))
    sizes = list(range(1, len(ranks) + 1))
    unsupported(dist.all_to_all_single, got, torch.ones(mine * len(ranks)), sizes, [mine] * len(ranks), group=group)


def _in_place_of_shape(rank: int, ranks: Any, group: Any, root: int, x: torch.Tensor, op: Any) -> None:
    all_reduce(torch.ones(2, 6) if rank == root else torch.ones(12), group=group)


def _reduce(rank: int, ranks: Any, group: Any, root: int, x: torch.Tensor, op: Any) -> None:
    place = list(ranks).index(root)
    if rank == root:
        dist.reduce(x, op=op, group=group, group_dst=place)
    else:
        dist.reduce(x, root, op, group)


def _either_name(rank: int, ranks: Any, group: Any, root: int, x: torch.Tensor, op: Any) -> None:
    out = torch.empty(len(ranks) * x.numel(), dtype=x.dtype)
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
        (gather if rank == root else dist.all_gather_into_tensor)(out, x, group)


def _refused(rank: int, ranks: Any, group: Any, root: int, x: torch.Tensor, op: Any) -> None:
    """Some ranks make a mistake that torch sees at once, and mend it."""
    if rank == root:
        for wrong in ((), (x,), ([x], "x", group)):
            try:
                dist.all_gather(*wrong)
            except (TypeError, ValueError):
                continue
            raise AssertionError("torch takes it")
    dist.all_gather([x.clone() for _ in ranks], x, group)


class Unreadable:
    """Can be sent, but not be read."""

    def __reduce__(self) -> Any:
        return _unreadable, ()


def _unreadable() -> None:
    raise ValueError("not here")


def _received_in_vain(rank: int, ranks: Any, group: Any, root: int, x: torch.Tensor, op: Any) -> None:
    """One rank alone fails when all have taken part."""
    failed = False
    try:
        dist.gather_object(Unreadable(), [None for _ in ranks] if rank == root else None, root, group)
    except ValueError:
        failed = True
    assert failed == (rank == root)
    dist.barrier(group)


OPERATIONS: dict[str, Callable[..., None]] = {
    "all_reduce": lambda rank, ranks, group, root, x, op: all_reduce(x, op=op, group=group),
    "all_reduce async": lambda rank, ranks, group, root, x, op: all_reduce(x, op, group, async_op=True).wait(),
    "broadcast": lambda rank, ranks, group, root, x, op: dist.broadcast(x, root, group),
    "reduce": _reduce,
    "all_gather": lambda rank, ranks, group, root, x, op: dist.all_gather([x.clone() for _ in ranks], x, group),
    "into one": _either_name,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": lambda rank, ranks, group, root, x, op: unsupported(
        dist.reduce_scatter, x, [x.clone() for _ in ranks], op, group
    ),
    "all_to_all": lambda rank, ranks, group, root, x, op: unsupported(
        dist.all_to_all, [x.clone() for _ in ranks], [x.clone() for _ in ranks], group
    ),
    "all_to_all_single": _uneven_exchange,
    "barrier": lambda rank, ranks, group, root, x, op: dist.barrier(group),
    "all_gather_object": lambda rank, ranks, group, root, x, op: dist.all_gather_object(
        [None for _ in ranks], {"rank": rank}, group
    ),
    "broadcast_object_list": lambda rank, ranks, group, root, x, op: dist.broadcast_object_list([rank], root, group),
    "gather_object": _objects_to_one,
    "scatter_object_list": _objects_from_one,
    "send and recv": _point_to_point,
    "other shape": _in_place_of_shape,
    "refused": _refused,
    "received in vain": _received_in_vain,
}


def threads(rank: int, size: int, ledger: Ledger, count: int) -> None:
    """Each thread has a group of its own; the default group is used meanwhile."""
    groups = [dist.new_group(timeout=TIMEOUT) for _ in range(3)]
    failed: list[BaseException] = []

    def use(group: Any, elements: int) -> None:
        try:
            for number in range(count):
                all_reduce(torch.ones(elements + number), group=group)
                dist.all_gather_object([None] * size, number, group)
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=use, args=(group, 10 * index)) for index, group in enumerate(groups)]
    for worker in workers:
        worker.start()
    for number in range(count):
        dist.broadcast(torch.ones(number), 0)
    for worker in workers:
        worker.join()
    if failed:
        raise failed[0]
    dist.barrier()


def training(rank: int, size: int, ledger: Ledger, steps: int) -> None:
    """`DistributedDataParallel` with buffers, and uneven ends through `Join`."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    model = DistributedDataParallel(net)
    for _ in range(steps):
        model(torch.randn(3, 4)).sum().backward()
    with Join([model]):
        for _ in range(steps + rank):
            model(torch.randn(3, 4)).sum().backward()
    with model.no_sync():
        model(torch.randn(3, 4)).sum().backward()
    dist.all_gather_object([None] * size, rank)


def sharded(rank: int, size: int, ledger: Ledger) -> None:
    """A mesh of two dimensions, distributed tensors, and a model that is sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("a", "b"))
    whole = torch.arange(16.0).reshape(4, 4)
    assert torch.equal(distribute_tensor(whole, mesh, [Shard(0), Shard(1)]).full_tensor(), whole)
    for name in ("a", "b"):
        all_reduce(torch.ones(3), group=mesh[name].get_group())
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    for layer in model:
        fully_shard(layer, mesh=mesh["b"])
    fully_shard(model, mesh=mesh["b"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()


def anew(rank: int, size: int, ledger: Ledger, times: int) -> None:
    """The default group is made anew, and other things are done in it."""
    for number in range(times):
        all_reduce(torch.ones(number + 1))
        group = dist.new_group([0, 1], timeout=TIMEOUT)
        if rank < 2:
            (all_reduce if number % 2 else dist.broadcast)(
                torch.ones(number + 1), **({} if number % 2 else {"src": 0}), group=group
            )
            dist.destroy_process_group(group)
        time.sleep(0.02 * rank)  # so that one is ahead of the others
        dist.destroy_process_group()
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=TIMEOUT)
    assert ledger.latest(rank, "") == 2
    dist.barrier()
    assert ledger.latest(rank, "") == 1
    assert ledger.latest(rank, "", times) == 2


def own_groups(rank: int, size: int, ledger: Ledger) -> None:
    """Each rank a group of its own, all members named or not, one made by its members only, and foreign groups."""
    alone = dist.new_group([rank], timeout=TIMEOUT)
    all_reduce(torch.ones(rank + 1), group=alone)
    dist.new_group(None if rank else list(range(size)), timeout=TIMEOUT)
    if rank != 1:
        local = dist.new_group([2, 0], use_local_synchronization=True, timeout=TIMEOUT)
        all_reduce(torch.ones(2), group=local)
    pair = dist.new_group([0, 1], timeout=TIMEOUT)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Running .* which does not belong", UserWarning)
        all_reduce(torch.ones(5), group=pair)
    before = ledger.latest(rank, "")
    dist.new_subgroups(1, timeout=TIMEOUT)
    assert ledger.latest(rank, "") == before + size
    dist.barrier()


def other_numbers(rank: int, size: int, ledger: Ledger, folder: str) -> None:
    """A program that makes two worlds of its ranks, which do different things, is recorded but not compared."""
    dist.destroy_process_group()
    world, place = rank % 2, rank // 2
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{world}", rank=place, world_size=size // 2, timeout=TIMEOUT
    )
    for number in range(10):
        if world:
            dist.broadcast(torch.ones(number), 0)
        else:
            all_reduce(torch.ones(number))
    found = ledger.find(rank, "", 10)
    assert found is not None
    assert found.name == ("broadcast" if world else "all_reduce")
    assert found.generation == (2 if place == rank else 0)


def a_program_under_way(rank: int, size: int, ledger: Ledger) -> None:
    """What is written: the call a rank is in, where it is called, and the step."""
    peer = 1 - rank
    if rank == 0:
        dist.barrier()
    else:
        until = time.monotonic() + 10
        while (call := ledger.entry(peer).call) is None and time.monotonic() < until:
            time.sleep(0.002)
        assert call is not None
        assert (call.name, call.group, call.sequence, call.generation) == ("barrier", "", 1, 1)
        assert call.site.startswith("recorder_cases.py:")
        dist.barrier()
    assert ledger.entry(rank).call is None
    dist.all_gather_object([None] * size, rank)
    entry = ledger.entry(rank)
    assert (entry.phase, entry.calls, entry.steps) == (Phase.RUNNING, 2, 0)
    gathered = ledger.find(rank, "", 2)
    assert gathered is not None
    assert (gathered.name, gathered.shape, gathered.dtype) == ("all_gather_object", None, None)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2))
    assert ledger.entry(rank).steps == 1
    recorder.uninstall()
    model(torch.ones(1, 2))
    dist.barrier()
    assert ledger.entry(rank).steps == 1
    assert ledger.entry(rank).call is None
    assert ledger.latest(rank, "") < 4


def compiled(rank: int, size: int, ledger: Ledger) -> None:
    """`torch.compile` does not make constants of what is written, nor other graphs than without the recorder."""

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.barrier()
        return y + 1

    def graphs(function: Callable[..., Any], x: torch.Tensor) -> list[int]:
        found: list[int] = []

        def backend(graph: Any, inputs: Any) -> Any:
            found.append(len(graph.graph.nodes))
            return graph

        torch._dynamo.reset()
        quick = torch.compile(function, backend=backend)
        for _ in range(3):
            quick(x)
        return found

    model = DistributedDataParallel(torch.nn.Linear(2, 3))
    warnings.filterwarnings("ignore", module=r"torch\.")
    with_recorder = graphs(step, torch.ones(2)), graphs(lambda x: model(x).sum() * 2, torch.ones(1, 2))
    assert ledger.latest(rank, "") == 3
    assert ledger.entry(rank).steps == 3
    recorder.uninstall()
    assert with_recorder == (graphs(step, torch.ones(2)), graphs(lambda x: model(x).sum() * 2, torch.ones(1, 2)))


# Different programs: the rank that comes second says so.


def differ(rank: int, size: int, ledger: Ledger, kind: str) -> None:
    """Rank 0 is in a collective; rank 1 comes and calls something else."""
    for _ in range(3):
        dist.barrier()
    first, second = DIFFERENCES[kind]
    if rank == 0:
        first()
    else:
        until = time.monotonic() + 10
        while ledger.latest(0, "") < 4 and time.monotonic() < until:
            time.sleep(0.002)
        second()
    raise AssertionError("the difference was not seen")


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


DIFFERENCES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "operation": (lambda: dist.broadcast(ones(10), 0), lambda: all_reduce(ones(10))),
    "object": (lambda: dist.all_gather_object([None, None], 1), lambda: dist.all_gather([ones(1), ones(1)], ones(1))),
    "shape": (lambda: all_reduce(ones(10)), lambda: all_reduce(ones(2, 6))),
    "dtype": (lambda: all_reduce(ones(10)), lambda: all_reduce(ones(10, dtype=torch.bfloat16))),
    "reduce op": (lambda: all_reduce(ones(10)), lambda: all_reduce(ones(10), dist.ReduceOp.MAX)),
    "root": (lambda: dist.broadcast(ones(10), 0), lambda: dist.broadcast(ones(10), group_src=1)),
    "target": (lambda: dist.reduce(ones(10), 0), lambda: dist.reduce(ones(10), 1)),
    "gathered dtype": (
        lambda: dist.all_gather([ones(1), ones(1)], ones(1)),
        lambda: dist.all_gather([ones(1).int(), ones(1).int()], ones(1).int()),
    ),
    "order": (
        lambda: (all_reduce(ones(3)), dist.barrier()),
        lambda: (dist.barrier(), all_reduce(ones(3))),
    ),
    "one more": (lambda: (all_reduce(ones(3)), all_reduce(ones(3))), lambda: dist.barrier()),
    "members": (lambda: dist.new_group([0, 1]), lambda: dist.new_group([1])),
    "async": (
        lambda: all_reduce(ones(3), async_op=True).wait(),
        lambda: all_reduce(ones(4), async_op=True).wait(),
    ),
}


def differ_in_a_group(rank: int, size: int, ledger: Ledger) -> None:
    """The difference is in a subgroup that has not all ranks."""
    group = dist.new_group([0, 2], timeout=TIMEOUT)
    all_reduce(ones(1))
    name = group.group_name if rank != 1 else ""
    if rank == 0:
        all_reduce(ones(5), group=group)
    elif rank == 2:
        until = time.monotonic() + 10
        while ledger.latest(0, name) < 1 and time.monotonic() < until:
            time.sleep(0.002)
        all_reduce(ones(6), group=group)
    else:
        time.sleep(15)
    raise AssertionError("the difference was not seen")
