"""What ranks do in `test_backend_crew.py`."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchcrew
from torchcrew.errors import PeerDied

#: Long beside every deadline here.
FOR_EVER = 100


def total() -> float:
    value = torch.tensor([torchcrew.rank() + 1.0])
    dist.all_reduce(value)
    return float(value)


def group_in_place() -> tuple[str, str, float]:
    """The backend's name, the group's class, and whether it works."""
    return dist.get_backend(), type(dist.group.WORLD).__name__, total()


def internet_sockets() -> int:
    """How many this process has, in whatever state."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{fd}").removeprefix("socket:[").rstrip("]"))
        except FileNotFoundError:  # that of the folder itself
            continue
    tables = [Path(f"/proc/self/net/{name}") for name in ("tcp", "tcp6", "udp", "udp6")]
    lines = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    return sum(fields[9] in inodes for fields in lines)


def sockets_while_working() -> tuple[int, float]:
    """With a subgroup, and while another thread has a collective."""
    pair = dist.new_group([0, 1])
    value = torch.ones(1)
    work = dist.all_reduce(value, group=pair, async_op=True)
    found = internet_sockets()
    work.wait()
    return found, float(value)


def asks(*calls: Any) -> list[Any]:
    """What is in place after each `init_process_group`: a backend, or its keywords; errors as texts."""
    found: list[Any] = []
    for call in calls:
        before = dist.group.WORLD
        try:
            if call == "destroy":
                dist.destroy_process_group()
                continue
            dist.init_process_group(**call) if isinstance(call, dict) else dist.init_process_group(call)
        except ValueError as error:
            found.append(str(error))
        else:
            found.append((dist.get_backend(), dist.group.WORLD is before, total()))
    return found


def asks_by_tcp() -> Any:
    """A script with the address of its environment, for gloo: real gloo, and no store that listens everywhere."""
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=address, rank=torchcrew.rank(), world_size=torchcrew.world_size())
    from tests.launcher.launch_cases import listening

    return dist.get_backend(), total(), {where for _, where in listening([os.getpid()])}


def times_out(seconds: float) -> None:
    """Rank 1 does not come."""
    dist.init_process_group(timeout=timedelta(seconds=seconds))
    total()
    if torchcrew.rank() == 1:
        sleeps_on_purpose()
    total()


def sleeps_on_purpose() -> None:
    time.sleep(FOR_EVER)


def trained(steps: int) -> list[torch.Tensor]:
    """The weights after some steps, with data of each rank's own."""
    torch.manual_seed(7)
    layers = [torch.nn.Linear(30, 50), torch.nn.ReLU(), torch.nn.Linear(50, 3)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(torchcrew.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 30, generator=generator)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def fails_in_training(how: str) -> None:
    """Rank 1 fails while the others wait in a backward pass."""
    model = DistributedDataParallel(torch.nn.Linear(20, 20))
    for step in range(3):
        if torchcrew.rank() == 1 and step == 2:
            time.sleep(0.05)
            if how == "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("of rank 1")
        model(torch.ones(2, 20)).sum().backward()


def fails_asynchronously(how: str) -> None:
    """The others wait in `Work.wait`."""
    if torchcrew.rank() == 1:
        time.sleep(0.05)
        if how == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("of rank 1")
    dist.all_reduce(torch.ones(3), async_op=True).wait()


def fails_unrecorded(how: str) -> None:
    """The others wait in a functional collective, whose errors come through C++."""
    import torch.distributed._functional_collectives as functional

    if torchcrew.rank() == 1:
        fails_asynchronously(how)
    functional.wait_tensor(functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD))


def catches_the_death() -> None:
    """Rank 0 takes note of rank 1's death, which is the cause even so."""
    if torchcrew.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        total()
    except PeerDied as error:
        raise RuntimeError("the evaluation has failed") from error


def returns_early() -> None:
    """Rank 1 has another idea of how often."""
    if torchcrew.rank() != 1:
        total()


def differs(how: str) -> None:
    """Rank 1 calls something else; "unseen": where the launcher's recorder does not look."""
    if how == "unseen":
        import torch.distributed._functional_collectives as functional

        value = torch.ones(10 if torchcrew.rank() == 0 else 3)
        functional.wait_tensor(functional.all_reduce(value, "sum", dist.group.WORLD))
    elif torchcrew.rank() == 1:
        dist.broadcast(torch.ones(10), src=0)
    else:
        dist.all_reduce(torch.ones(10))
