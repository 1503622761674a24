"""What the ranks of `test_aliases.py` do."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import torchcrew
from tests.collectives.ranks import all_gather_single, reduce_scatter_single
from torchcrew.errors import CollectiveMismatch


def works(size: int) -> None:
    """The group does what it should."""
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert ones.tolist() == [size] * 3


def in_place(rank: int, size: int) -> None:
    """Outputs that are parts of inputs, and the other way round."""
    for count in (10, 50_000):
        whole = torch.arange(size * count, dtype=torch.float64) + rank
        want = sum(torch.arange(size * count, dtype=torch.float64) + other for other in range(size))
        part = slice(rank * count, (rank + 1) * count)
        reduce_scatter_single(whole[part], whole)
        assert torch.equal(whole[part], want[part])
        gathered = torch.full((size * count,), -1.0)
        gathered[part] = rank
        all_gather_single(gathered, gathered[part])
        assert torch.equal(gathered, torch.arange(size).repeat_interleave(count).float())
        both = torch.arange(size * count) + 1000 * rank
        dist.all_to_all_single(both, both)
        assert both[::count].tolist() == [rank * count + 1000 * other for other in range(size)]
    works(size)


def parts_that_differ(rank: int, size: int) -> str:
    """reduce_scatter, whose parts are not the same on all ranks."""
    sizes = [3, 5] if rank == 0 else [4, 4]
    try:
        dist.reduce_scatter(torch.empty(sizes[rank]), [torch.ones(size) for size in sizes])
    except CollectiveMismatch as error:
        works(size)
        return str(error)
    return ""


def shared_memory(rank: int, size: int) -> None:
    """Tensors that are shared in each of torch's ways, and memory that grows."""
    for strategy in ("file_system", "file_descriptor"):
        mp.set_sharing_strategy(strategy)
        tensor = torch.full((50_000,), float(rank)).share_memory_()
        place = tensor.data_ptr()
        dist.all_reduce(tensor)
        assert tensor.data_ptr() == place
        assert tensor.tolist() == [sum(range(size))] * 50_000
    shared = torchcrew.share(torch.ones(100_000))
    for view in (shared[:20_000], shared, shared[1:70_000]):
        want = view[0].item() * size
        dist.all_reduce(view)
        assert view[0].item() == want
        view.fill_(1.0)
    before = _mappings()
    for _ in range(100):
        dist.all_reduce(torchcrew.share(torch.ones(20_000)))
    assert _mappings() - before <= 64 * (size - 1) + 4
    works(size)


def _mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum("torchcrew-storage" in line for line in file)


def refused(rank: int, size: int) -> list[str]:
    """What cannot be written, or has no memory: refused before anybody waits, and the group goes on."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    found = []
    with FakeTensorMode():
        fake = torch.ones(3)
    mesh = init_device_mesh("cpu", (size,))
    distributed = DTensor.from_local(torch.ones(3), mesh, [Replicate()])
    calls: list[Any] = [
        lambda: dist.all_reduce(torch.ones(1).expand(4)),
        lambda: dist.broadcast(torch.ones(1).expand(4), 0 if rank else size - 1),
        lambda: dist.group.WORLD.allreduce([fake]).wait(),
        lambda: dist.group.WORLD.allreduce([distributed]).wait(),
        lambda: dist.all_reduce(torch.ones(2, device="meta")),
    ]
    for call in calls:
        try:
            call()
        except ValueError as error:
            found.append(str(error))
    return found


def callbacks(rank: int, size: int) -> None:
    """A callback of a future that calls a collective, and waits for it."""
    first, second = torch.ones(4), torch.ones(4)

    def go_on(_: Any) -> list[torch.Tensor]:
        dist.all_reduce(second, async_op=True).get_future().wait()
        dist.all_reduce(second)
        return [second]

    gate = torch.ones(1)
    opened = dist.all_reduce(gate, async_op=True)
    ended = dist.all_reduce(first, async_op=True).get_future().then(go_on)
    opened.wait()
    ended.wait()
    assert second.tolist() == [size * size] * 4
    works(size)


def child_aborts(rank: int, size: int) -> int:
    """A forked child that aborts the group, and destroys it."""
    pid = os.fork()
    if pid == 0:
        try:
            dist.group.WORLD.abort()
            dist.group.WORLD.shutdown()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    works(size)
    return rank
