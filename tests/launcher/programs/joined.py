"""A program that another launcher starts as each of its ranks; prints one line of JSON for each of its arguments."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import init_process_group  # before anybody knows of a launch

import torchcrew
from tests.multiprocessing.rendezvous_cases import listening
from torchcrew.launcher import joining

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR")


def launch(fn: Any, *args: Any, backend: str | None = "auto", **kwargs: Any) -> list[Any]:
    """Join, as `torchcrew.launch` does."""
    outer = joining.outer()
    assert outer is not None
    return joining.run_joined(outer, fn, args, kwargs, backend)


def total(number: float) -> tuple[int, int, float, str]:
    """A sum over all ranks, and who this is."""
    value = torch.tensor(number * (dist.get_rank() + 1))
    dist.all_reduce(value)
    return torchcrew.rank(), torchcrew.world_size(), value.item(), dist.get_backend()


def as_torchrun_code_does(number: float) -> Any:
    """Its own group, which it takes down."""
    init_process_group("gloo")
    try:
        return total(number)
    finally:
        dist.destroy_process_group()


def has_none() -> bool:
    return dist.is_initialized()


def fail() -> None:
    raise KeyError(f"rank {torchcrew.rank()}")


def several() -> dict[str, Any]:
    """Launch after launch in one program."""
    found: dict[str, Any] = {
        "first": launch(total, number=2),
        "own group": launch(as_torchrun_code_does, 3),
        "without": launch(has_none, backend=None),
        "backends": [launch(lambda: dist.get_backend(), backend=name)[1] for name in ("cpu:gloo", "gloo")],
        "again": [launch(total, 1) for _ in range(3)],
        "tensor": [value.tolist() for value in launch(lambda: torch.arange(2) + torchcrew.rank())],
        "environment": [os.environ.get(name) for name in VARIABLES],
        "listening": listening(),
    }
    try:
        launch(fail)
    except KeyError as error:
        found["error"] = error.args[0]
    return found


def user_has_a_group() -> dict[str, Any]:
    """The program made its group before."""
    init_process_group("gloo")
    before = dist.group.WORLD
    found = {"total": launch(total, 1), "same": dist.group.WORLD is before}
    dist.destroy_process_group()
    return found


def one_fails() -> None:
    """Rank 1 raises while the others wait for it."""
    launch(raise_in_rank_1)


def raise_in_rank_1() -> None:
    dist.all_reduce(torch.ones(1))
    if torchcrew.rank() == 1:
        raise KeyError("this one")
    dist.all_reduce(torch.ones(1))


def waits() -> None:
    """Rank 0 and rank 1 wait, for ever, for what only a third one could do."""
    launch(wait_for_the_other)


def wait_for_the_other() -> None:
    dist.barrier()
    sys.stdout.write("waiting\n")
    sys.stdout.flush()
    dist.recv(torch.ones(1), 1 - torchcrew.rank())


def starts_nothing() -> Any:
    """What a program says that is no rank."""
    return joining.outer()


if __name__ == "__main__":
    for case in sys.argv[1:]:
        sys.stdout.write(json.dumps(globals()[case]()) + "\n")
        sys.stdout.flush()
