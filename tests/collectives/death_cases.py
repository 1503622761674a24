"""Ranks that die, stop, leave or are interrupted; and what the others see."""

from __future__ import annotations

import _thread
import os
import random
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.collectives.ranks import hear, tell

MANY = 200_000


def stream(rank: int, size: int, seed: int) -> str:
    """Small and large collectives until something happens; what was wrong with a result."""
    draw, number = random.Random(seed), 0
    shared = torch.empty(MANY).share_memory_()
    tell("ready")
    while True:
        number += 1
        count = draw.choice((1, 100, 5000, MANY))
        kind = draw.randrange(4)
        tensor = shared if kind == 0 and count == MANY else torch.empty(count)
        tensor.fill_(rank + number)
        if kind < 2:
            dist.all_reduce(tensor)
            expected: float = sum(range(number, number + size))
        elif kind == 2:
            dist.broadcast(tensor, number % size)
            expected = number % size + number
        else:
            dist.all_reduce(tensor, async_op=True).wait()
            expected = sum(range(number, number + size))
        if not (tensor == expected).all():
            return f"call {number} of {count} elements gave {tensor[:3].tolist()}, not {expected}"


def late(rank: int, size: int, what: str, seconds: float) -> Any:
    """Rank 1 does not come to the second collective; what the others get, and how the group is then."""
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    tell("ready")
    if rank == 1:
        return _be_late(what)
    begin = time.monotonic()
    try:
        if what == "async":
            dist.all_reduce(tensor, async_op=True).wait()
        else:
            dist.all_reduce(tensor)
    except BaseException as error:
        again = ""
        try:
            dist.all_reduce(tensor)
        except RuntimeError as second:
            again = str(second)
        return type(error).__name__, str(error), again, time.monotonic() - begin
    return "nothing"


def _be_late(what: str) -> Any:
    if what in ("sleeps", "stops", "async"):
        somewhere_else()
    elif what == "destroys":
        dist.destroy_process_group()
    elif what == "raises":
        raise ValueError("of its own")
    elif what == "exits":
        os._exit(0)
    return "late"


def somewhere_else() -> None:
    """Where a rank is that does not come."""
    time.sleep(30)


def interrupted(rank: int, size: int) -> Any:
    """Rank 0 is interrupted while it waits for rank 1; what each gets."""
    dist.barrier()
    try:
        if rank == 0:
            threading.Timer(0.2, _thread.interrupt_main).start()
            dist.all_reduce(torch.ones(MANY))
        else:
            hear()
            dist.all_reduce(torch.ones(MANY))
    except KeyboardInterrupt:
        tell("interrupted")
        try:
            dist.barrier()
        except RuntimeError as error:
            return str(error)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def forked(rank: int, size: int) -> Any:
    """What a forked child gets from the group; the parent goes on with it, whatever the child does."""
    dist.all_reduce(torch.ones(3), async_op=True).wait()
    ours, theirs = os.pipe()
    child = os.fork() if rank == 0 else 0
    if rank == 0 and child == 0:
        for call in (lambda: dist.all_reduce(torch.ones(3)), lambda: dist.barrier(async_op=True).wait()):
            try:
                call()
                os.write(theirs, b"nothing\n")
            except BaseException as error:
                os.write(theirs, f"{type(error).__name__}: {error}\n".encode())
        try:
            dist.destroy_process_group()
        finally:
            os._exit(0)
    text = ""
    if rank == 0:
        os.waitpid(child, 0)
        text = os.read(ours, 10_000).decode()
    for tensor in (torch.ones(3), torch.ones(MANY)):
        dist.all_reduce(tensor)
        assert (tensor == size).all()
    return text


def own_timeout(rank: int, size: int) -> Any:
    """A barrier that has a timeout of its own, on a group with one."""
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    dist.barrier(group)
    if rank == 1:
        hear(10)
        return None
    try:
        dist.barrier(group)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def destroyed_while_waiting(rank: int, size: int) -> Any:
    """Rank 0 gives up a group in which an asynchronous call waits; how long that takes, and which threads are left."""
    group = dist.new_group()
    dist.barrier(group)
    if rank == 1:
        return hear(15)
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    time.sleep(0.05)
    begin = time.monotonic()
    group.abort()
    seconds = time.monotonic() - begin
    try:
        work.wait()
    except BaseException as error:
        time.sleep(0.1)
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("torchcrew-group")]
        return seconds, f"{type(error).__name__}: {error}", left
    return seconds, "nothing", []
