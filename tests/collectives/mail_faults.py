"""What the ranks of `test_mail.py` run where messages fail, ranks end, or nothing happens."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.collectives.mail_cases import LARGE, exchange, irecv, isend, made, same
from tests.collectives.ranks import tell
from torchcrew.errors import CollectiveMismatch, CollectiveTimeout, PeerDied


def errors(rank: int, size: int) -> None:
    """Sizes that differ, arguments that cannot be meant, to oneself, a forked child: and the group goes on."""
    other = 1 - rank
    for count in (0, 1, 3, LARGE):
        work = isend(torch.zeros(2), other)
        found = torch.full((count,), 5.0)
        with pytest.raises(CollectiveMismatch, match="a message of 8 bytes with the tag 0") as raised:
            dist.recv(found, other)
        assert f"has {4 * count} bytes" in str(raised.value)
        assert f"rank {other} (pid " in str(raised.value)
        assert (found == 5).all()
        work.wait()
    group: Any = dist.group.WORLD
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="rank"):
        dist.send(one, rank)
    with pytest.raises(ValueError, match="no rank 2"):
        group.send([one], 2, 0)
    with pytest.raises(ValueError, match="no rank -1"):
        group.recv([one], -1, 0)
    with pytest.raises(ValueError, match="one tensor, but got 2"):
        group.recv([one, one], 0, 0)
    with pytest.raises(ValueError, match="dense"):
        group.send([one.to_sparse()], 0, 0)
    tensor = torch.zeros(1)
    wanted = irecv(tensor, rank)
    isend(torch.ones(1), rank)
    wanted.wait()
    assert tensor == 1
    pending = irecv(tensor, other, tag=9)
    pid = os.fork()
    if pid == 0:
        refused = 0
        for attempt in (pending.wait, lambda: dist.send(torch.zeros(1), other), lambda: dist.recv(tensor, other)):
            try:
                attempt()
            except RuntimeError as error:
                refused += "forked" in str(error)
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    dist.barrier()
    dist.send(torch.full((1,), 4.0), other, tag=9)
    pending.wait()
    assert tensor == 4
    exchange(rank, made(rank, LARGE), made(other, LARGE))


def timeouts(rank: int, size: int) -> str:
    """A message that does not come, one that comes later, and one that stops in the middle."""
    if rank == 1:
        dist.barrier()  # until the other has given up
        time.sleep(0.2)
        dist.send(torch.ones(1), 0, tag=3)
        dist.recv(torch.empty(LARGE), 0, tag=4)
        with pytest.raises((PeerDied, CollectiveTimeout)) as raised:
            dist.send(torch.ones(LARGE), 0, tag=1)
        return f"{type(raised.value).__name__}: {raised.value}"
    group: Any = dist.group.WORLD
    group.set_timeout(timedelta(seconds=0.5))
    tensor = torch.empty(1)
    kept = irecv(tensor, 1, tag=3)
    texts = [
        late(lambda: kept.wait(timedelta(seconds=0.1))),
        late(lambda: dist.recv(torch.empty(1), 1, tag=2)),
        late(lambda: dist.recv(torch.empty(1), tag=2)),
    ]
    for text in texts:
        assert text.startswith("rank 1 (pid ")
        assert "in timeouts" in text, text  # where it is
    assert "a message of 4 bytes with the tag 2" in texts[1]
    group.set_timeout(timedelta(seconds=15))
    dist.barrier()
    kept.wait()
    assert tensor == 1
    dist.send(torch.zeros(LARGE), 1, tag=4)
    # The other rank does not take this. What has begun cannot be withdrawn: the group is broken, and says so to it.
    group.set_timeout(timedelta(seconds=0.3))
    assert "did not take a message" in late(lambda: isend(torch.zeros(LARGE), 1, tag=5).wait())
    with pytest.raises(RuntimeError, match="in the middle of a message"):
        dist.send(torch.zeros(1), 1)
    return "broken"


def late(attempt: Callable[[], Any]) -> str:
    """What is told of a message that does not come in time; soon after that."""
    begin = time.monotonic()
    with pytest.raises(CollectiveTimeout) as raised:
        attempt()
    assert time.monotonic() - begin < 3
    return str(raised.value)


def is_killed(rank: int, size: int) -> str:
    """Rank 1 is killed: who waits for it learns it; what it has sent whole is there; others go on."""
    if rank == 1:
        isend(torch.full((1000,), 5.0), 0, tag=1)
        isend(torch.full((LARGE,), 5.0), 0, tag=2)
        tell(os.getpid())
        time.sleep(60)
    tell(os.getpid())
    found = torch.empty(1000)
    with pytest.raises(PeerDied) as raised:
        dist.recv(torch.empty(1), 1, tag=3)
    text = f"{time.monotonic()} {raised.value}"
    if rank == 0:
        dist.recv(found, 1, tag=1)
        assert (found == 5).all()
        for attempt in (
            lambda: dist.recv(torch.empty(LARGE), 1, tag=2),
            lambda: dist.send(torch.empty(LARGE), 1),
            lambda: dist.recv(found, 1, tag=1),
        ):
            begin = time.monotonic()
            with pytest.raises(PeerDied, match=r"^rank 1 \(pid "):
                attempt()
            assert time.monotonic() - begin < 1
        dist.send(made(0, LARGE), 2)
    else:
        large = torch.empty(LARGE)
        assert dist.recv(large) == 0
        assert same(large, made(0, LARGE))
    return text


def leaves(rank: int, size: int) -> Any:
    """What was sent whole is received behind its sender's end; then nothing comes any more, also not from anybody."""
    if rank > 0:
        for number in range(3):
            isend(torch.full((1000,), float(number)), 0)
        isend(made(rank, LARGE), 0, tag=1)
        dist.destroy_process_group()
        return None
    large = torch.empty(LARGE)
    for other in range(1, size):
        dist.recv(large, other, tag=1)
        assert same(large, made(other, LARGE))
    time.sleep(0.2)
    tensor = torch.empty(1000)
    for other in range(1, size):
        for number in range(3):
            dist.recv(tensor, other)
            assert (tensor == number).all()
    texts = []
    for source in (1, None):
        with pytest.raises(PeerDied) as raised:
            dist.recv(tensor, source)
        texts.append(str(raised.value))
    dist.destroy_process_group()
    return texts


def idle(rank: int, size: int) -> float:
    """Seconds of CPU in a second and a half of waiting, with and without somebody who waits."""
    tensor = torch.empty(1)
    if rank == 1:
        time.sleep(3.2)
        dist.send(tensor, 0)
        dist.send(tensor, 0)
        return 0.0
    works = [irecv(tensor, 1), irecv(torch.empty(1), 1)]
    time.sleep(0.1)
    begin = time.process_time()
    time.sleep(1.5)
    works[0].wait()
    used = time.process_time() - begin
    works[1].wait()
    return used


def lets_go(rank: int, size: int) -> tuple[int, int, int]:
    """Groups that come and go, with letters that nobody waits for, leave nothing behind."""
    counts = []
    for turn in range(4):
        group = dist.new_group(list(range(size)))
        other = 1 - rank
        irecv(torch.empty(1), other, group=group, tag=9)
        work = irecv(torch.empty(LARGE), other, group=group)
        isend(torch.zeros(LARGE), other, group=group)
        work.wait()
        dist.barrier(group)
        pending = irecv(torch.empty(1), other, group=group, tag=8)
        dist.destroy_process_group(group)
        with pytest.raises(RuntimeError, match="destroyed"):
            pending.wait()
        del group, work
        with open("/proc/self/maps") as file:
            maps = sum("torchcrew-group" in line for line in file)
        if turn:
            counts.append((maps, len(os.listdir("/proc/self/fd")), threading.active_count()))
    assert len(set(counts)) == 1, counts
    return counts[0]
