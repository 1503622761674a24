"""What the ranks of `test_rendezvous.py` run: importable by name in every process."""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.multiprocessing.spawn_cases import end


def listening() -> list[str]:
    """The addresses that this process listens at."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address = fields[1].partition(":")[0]
                found.append(socket.inet_ntoa(struct.pack("=I", int(address, 16))) if name == "tcp" else address)
    return found


def train(rank: int, world_size: int, data: torch.Tensor, target: torch.Tensor, epochs: int, queue: Any) -> None:
    """Distributed training as the tutorials have it."""
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        optimizer.zero_grad()
        (model(data[rank::world_size]) - target[rank::world_size]).square().mean().backward()
        optimizer.step()
    queue.put((rank, model.module.weight.detach().tolist(), listening()))
    dist.destroy_process_group()


def the_model_is_the_last(rank: int, world_size: int) -> None:
    """The model is let go of after the group was destroyed, and right after an operation."""
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    group = weakref.ref(dist.group.WORLD)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    model(torch.ones(2, 4)).sum().backward()
    weights = [torch.empty(1, 4) for _ in range(world_size)]
    dist.all_gather(weights, model.module.weight.detach())
    dist.destroy_process_group()
    del model
    assert group() is not None


def collectives(rank: int, world_size: int) -> None:
    """All kinds, in the default group, a part of it, and a second default group."""
    for _ in range(3):
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        total = torch.full((3,), float(rank))
        dist.all_reduce(total)
        assert total.tolist() == [sum(range(world_size))] * 3
        dist.barrier()
        objects: list[Any] = [None] * world_size
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": index} for index in range(world_size)]
        group = dist.new_group([0, 1])
        if rank < 2:
            ones = torch.ones(1)
            dist.all_reduce(ones, group=group)
            assert ones.item() == 2
        dist.monitored_barrier()
        dist.destroy_process_group()


def without_numbers(index: int, count: int) -> None:
    """Rank and size are those of the spawn."""
    dist.init_process_group("gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (index, count)
    mesh = dist.init_device_mesh("cpu", (count,))
    assert mesh.get_local_rank() == index
    dist.destroy_process_group()


def other_numbers(index: int, count: int) -> None:
    """The program's own numbers count."""
    rank = (index + 1) % count
    dist.init_process_group("gloo", rank=rank, world_size=count)
    gathered = [torch.zeros(1) for _ in range(count)]
    dist.all_gather(gathered, torch.tensor([float(index)]))
    assert [int(one) for one in gathered] == [(rank - 1) % count for rank in range(count)]
    dist.destroy_process_group()


def numbers_in_the_environment(index: int, count: int) -> None:
    os.environ.update(RANK=str(count - 1 - index), WORLD_SIZE=str(count))
    dist.init_process_group("gloo")
    assert dist.get_rank() == count - 1 - index
    dist.destroy_process_group()


def part_then_all(index: int) -> None:
    """Two of three, then all three, then the two others."""
    for members in ([0, 1], [0, 1, 2], [1, 2], [0, 1, 2]):
        if index in members:
            dist.init_process_group("gloo", rank=members.index(index), world_size=len(members))
            ones = torch.ones(1)
            dist.all_reduce(ones)
            assert ones.item() == len(members)
            dist.destroy_process_group()


def same_rank(_: int) -> None:
    dist.init_process_group("gloo", rank=0, world_size=2)


def too_many(index: int) -> None:
    dist.init_process_group("gloo", rank=index, world_size=3)


def store_kind() -> str:
    """What the default group meets in, and where this process listens."""
    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return type(store).__name__


def by_environment(index: int, queue: Any, set_here: dict[str, str]) -> None:
    """A user who gives an address, before or in the child."""
    os.environ.update(set_here)
    dist.init_process_group("gloo", rank=index, world_size=2)
    dist.barrier()  # else one may be gone before the other has connected
    queue.put((store_kind(), os.environ.get("GLOO_SOCKET_IFNAME")))
    dist.destroy_process_group()


def by_argument(index: int, how: str, path: str, queue: Any) -> None:
    if how == "init_method":
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=index, world_size=2)
    else:
        dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=index, world_size=2)
    dist.barrier()  # else one may be gone before the other has connected
    queue.put((store_kind(), os.environ.get("GLOO_SOCKET_IFNAME")))
    dist.destroy_process_group()


def ours_then_address(index: int, port: int, queue: Any) -> None:
    dist.init_process_group("gloo", rank=index, world_size=2)
    dist.barrier()
    first = os.environ.get("GLOO_SOCKET_IFNAME")
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=index, world_size=2)
    dist.barrier()
    queue.put((first, os.environ.get("GLOO_SOCKET_IFNAME")))
    dist.destroy_process_group()


def interface(_: int, queue: Any) -> None:
    """What is in the environment before and after."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    dist.init_process_group("gloo")
    dist.barrier()
    queue.put((before, os.environ.get("GLOO_SOCKET_IFNAME")))
    dist.destroy_process_group()


def one_stays_away(index: int, how: str) -> None:
    """Rank 1 never comes."""
    if index == 1:
        time.sleep(0.2)
        end(how)
        return
    dist.init_process_group("gloo", rank=index, world_size=3)


def one_is_late(index: int) -> None:
    if index == 1:
        time.sleep(60)
    from datetime import timedelta

    dist.init_process_group("gloo", timeout=timedelta(seconds=0.5))


def one_fails_in_training(index: int, how: str, tidy: bool) -> None:
    """Rank 2 ends while the others wait for it in a collective."""
    dist.init_process_group("gloo")
    try:
        dist.all_reduce(torch.ones(1))
        if index == 2:
            time.sleep(0.2)
            end(how)
        dist.all_reduce(torch.ones(1))
    finally:
        if tidy:
            dist.destroy_process_group()


def modules(_: int, queue: Any) -> None:
    """What a rank that uses no process group has done for one."""
    queue.put((os.environ.get("GLOO_SOCKET_IFNAME"), "torch._dynamo" in sys.modules))


def forks_a_child(index: int) -> None:
    """A child that outlives nobody keeps the rank's place, as any process of the rank."""
    pid = os.fork()
    if pid == 0:
        time.sleep(0.3)
        os._exit(0)
    dist.init_process_group("gloo")
    dist.destroy_process_group()
    os.waitpid(pid, 0)
