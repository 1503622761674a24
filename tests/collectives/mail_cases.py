"""What the ranks of `test_mail.py` run: importable by name in every process."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torchcrew.errors import CollectiveTimeout

#: As torch says they may return None, to a rank that is not in the group.
isend: Any = dist.isend
irecv: Any = dist.irecv
#: Elements of float32 that no ring holds.
LARGE = 3_000_001
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.uint16,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)


def made(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What rank ``rank`` sends: values that no other has."""
    return ((torch.arange(count) % 11 + rank) % 7).to(torch.float32).to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit; the types that have no comparison, too."""
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def values(rank: int, size: int) -> None:
    """Every size about slots and rings, every type, any layout; blocking and not."""
    other = 1 - rank
    for dtype in DTYPES:
        for count in (0, 1, 1000):
            exchange(rank, made(rank, count, dtype), made(other, count, dtype))
    slot = 64 << 10
    for count in (slot - 65, slot - 64, slot - 63, slot, 8 * slot - 64, 8 * slot - 63, 9 * slot, LARGE):
        exchange(rank, made(rank, count, torch.uint8), made(other, count, torch.uint8))
    layouts(rank, other)
    names: list[Any] = [{"rank": rank, "list": list(range(1000))}, None, "é"]
    if rank == 0:
        dist.send_object_list(names, 1)
    else:
        found: list[Any] = [None] * 3
        assert dist.recv_object_list(found, 0) == 0
        assert found == [{"rank": 0, "list": list(range(1000))}, None, "é"]
    dist.barrier()


def exchange(rank: int, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Both send, then receive; then one after the other."""
    other = 1 - rank
    found = torch.empty_like(theirs)
    work = isend(ours, other, tag=3)
    assert dist.recv(found, other, tag=3) == other
    assert work is not None
    assert work.wait()
    assert work.is_completed()
    assert same(found, theirs), (ours.dtype, ours.numel())
    found = torch.empty_like(theirs)
    for sender in (0, 1):
        if rank == sender:
            dist.send(ours, other)
        else:
            dist.recv(found, other)
    assert same(found, theirs), (ours.dtype, ours.numel())


def layouts(rank: int, other: int) -> None:
    """Elements that do not lie in a row, views, gradients, and memory that numpy looks at."""
    whole = made(rank, 60_000).view(200, 300)
    found = torch.zeros(300, 400)
    work = isend(whole.t(), other)
    dist.recv(found[:, 100:300], other)
    work.wait()
    expected = made(other, 60_000).view(200, 300).t()
    assert torch.equal(found[:, 100:300], expected)
    assert not found[:, :100].any()
    assert not found[:, 300:].any()
    weight = torch.zeros(5, requires_grad=True)
    work = isend(weight + rank, other)
    dist.recv(weight, other)
    work.wait()
    assert weight.tolist() == [other] * 5
    assert weight.is_leaf
    # A message that was kept until it was wanted, into a tensor that is not in a row.
    works = [isend(whole.t(), other, tag=8), isend(torch.ones(1), other, tag=9)]
    dist.recv(torch.empty(1), other, tag=9)
    found = torch.zeros(400, 300).t()
    dist.recv(found[:, 100:300], other, tag=8)
    assert torch.equal(found[:, 100:300], expected)
    for work in works:
        work.wait()
    batch = found.numpy()
    work = isend(torch.full((300, 400), 7.0), other)
    dist.recv(found, other)
    work.wait()
    assert (batch == 7).all()


def order(rank: int, size: int) -> None:
    """Tags out of order, more messages than a ring holds, and receives that are posted before or behind them."""
    other = 1 - rank
    if rank == 0:
        works = [isend(torch.full((40_000,), float(number)), 1, tag=number % 5) for number in range(50)]
        for work in works:
            work.wait()
        dist.recv(torch.empty(LARGE), 1, tag=77)
    else:
        found = []
        for tag in (4, 2, 0, 3, 1):
            for _ in range(10):
                tensor = torch.empty(40_000)
                dist.recv(tensor, 0, tag=tag)
                found.append(int(tensor[-1]))
        assert found == [number * 5 + tag for tag in (4, 2, 0, 3, 1) for number in range(10)]
        dist.send(torch.zeros(LARGE), 0, tag=77)
    # Posted receives of one tag get the messages in their order; another tag between them holds nobody up.
    tensors = [torch.empty(100_000) for _ in range(20)]
    wanted = [irecv(tensor, other, tag=1) for tensor in tensors]
    late = irecv(torch.empty(1), other, tag=2)
    dist.barrier()
    sent = [isend(torch.full((100_000,), float(number)), other, tag=1) for number in range(20)]
    for work in [*reversed(wanted), *sent]:
        work.wait()
    assert [int(tensor[0]) for tensor in tensors] == list(range(20))
    assert not late.is_completed()
    dist.barrier()
    dist.send(torch.ones(1), other, tag=2)
    late.wait()


def nobody_waits(rank: int, size: int) -> None:
    """What has been begun goes on while the program is elsewhere: in a collective, or computing."""
    other = 1 - rank
    ours, theirs = made(rank, LARGE), torch.empty(LARGE)
    # irecv, barrier, wait; the sender waits before its barrier.
    if rank == 0:
        work = irecv(theirs, 1)
        dist.barrier()
        work.wait()
        assert same(theirs, made(1, LARGE))
    else:
        dist.send(ours, 0)
        dist.barrier()
    # The order of sends and collectives differs.
    total = torch.ones(LARGE)
    if rank == 0:
        work = isend(ours, 1)
        dist.all_reduce(total)
        work.wait()
    else:
        dist.all_reduce(total)
        dist.recv(theirs, 0)
        assert same(theirs, made(0, LARGE))
    assert (total == 2).all()
    # Nothing but is_completed, and a future.
    sent, wanted = isend(ours, other), irecv(theirs, other)
    deadline = time.monotonic() + 10
    while not (sent.is_completed() and wanted.is_completed()):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert same(theirs, made(other, LARGE))
    assert wanted.is_success()
    wanted = irecv(theirs, other)
    answered = wanted.get_future().then(lambda future: isend(future.value()[0], other, tag=5))
    isend(ours, other)
    back = torch.empty(LARGE)
    dist.recv(back, other, tag=5)
    answered.wait().wait()
    assert same(back, ours)
    deadline = time.monotonic() + 10
    while any(thread.name.startswith("torchcrew-mail") for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the thread has nothing to do, but does not end"
        time.sleep(0.1)
    exchange(rank, ours, made(other, LARGE))


def ring(rank: int, size: int) -> None:
    """Everybody sends to the next and receives from the one before, in every order of the operations."""
    after, before = (rank + 1) % size, (rank - 1) % size
    for count in (1, 200_000):
        for reverse in (False, True):
            found = torch.empty(count)
            ops = [dist.P2POp(isend, made(rank, count), after), dist.P2POp(irecv, found, before)]
            for work in dist.batch_isend_irecv(ops[::-1] if reverse else ops):
                work.wait()
            assert same(found, made(before, count))
    # All to all, and a collective in the middle.
    found_of = [torch.empty(50_000) for _ in range(size)]
    works = [irecv(found_of[other], other, tag=4) for other in range(size) if other != rank]
    works += [isend(made(rank, 50_000), other, tag=4) for other in range(size) if other != rank]
    total = torch.ones(1)
    dist.all_reduce(total)
    for work in works:
        work.wait()
    assert total == size
    assert all(same(found_of[other], made(other, 50_000)) for other in range(size) if other != rank)


def anybody(rank: int, size: int) -> None:
    """One receives from whoever sends, and learns who it was; a receive by name takes what it should."""
    if rank == 0:
        found = []
        for _ in range(10 * (size - 1)):
            tensor = torch.empty(1000)
            source = dist.recv(tensor)
            assert (tensor == tensor[0]).all()
            found.append((source, int(tensor[0])))
        assert sorted(found) == [(other, number) for other in range(1, size) for number in range(10)]
        for other in range(1, size):
            assert [number for source, number in found if source == other] == list(range(10))
        large = torch.empty(LARGE)
        work = irecv(large, tag=6)
        named = torch.empty(1)
        dist.recv(named, 1, tag=7)
        work.wait()
        source = work._source_rank()
        assert same(large, made(source, LARGE))
        for _ in range(size - 2):
            dist.recv(large, tag=6)
    else:
        for number in range(10):
            dist.send(torch.full((1000,), float(number)), 0)
        work = isend(made(rank, LARGE), 0, tag=6)
        if rank == 1:
            dist.send(torch.ones(1), 0, tag=7)
        work.wait()
    dist.barrier()
    # In a group of some, ranks are counted in the job.
    some = dist.new_group([0, size - 1])
    if rank == size - 1:
        dist.send(made(rank, 5), 0, group=some)
    elif rank == 0:
        tensor = torch.empty(5)
        assert dist.recv(tensor, group=some) == size - 1
        assert same(tensor, made(size - 1, 5))


def callbacks(rank: int, size: int) -> None:
    """What a future calls waits for other messages, in the thread that moves them all."""
    if rank == 1:
        for tag in (1, 3):
            dist.barrier()
            dist.send(torch.ones(1), 0, tag=tag)
            time.sleep(0.1)  # until the other one is in the callback
            dist.send(made(1, LARGE), 0, tag=tag + 1)
        dist.barrier()
        for tag in (5, 6, 7):
            dist.send(torch.ones(1), 0, tag=tag)
            time.sleep(0.1)
        dist.recv(torch.empty(1), 0)
        return
    large = torch.empty(LARGE)
    for tag in (1, 3):
        first = irecv(torch.empty(1), 1, tag=tag)
        then = first.get_future().then(lambda _, tag=tag: irecv(large.zero_(), 1, tag=tag + 1).wait())
        dist.barrier()
        if tag == 1:  # this thread moves them; else the group's own
            first.wait()
        until(then.done)
        then.wait()
        assert same(large, made(1, LARGE))
    # The next two end in the same step, as nothing moves during the first callback.
    works = [irecv(torch.empty(1), 1, tag=tag) for tag in (5, 6, 7)]
    slow = works[0].get_future().then(lambda _: time.sleep(0.4))
    then = works[1].get_future().then(lambda _: works[2].wait())
    dist.barrier()
    works[1].wait()
    until(then.done)
    then.wait()
    slow.wait()
    # One that does not come.
    work = irecv(torch.empty(1), rank, tag=8)
    then = work.get_future().then(lambda _: irecv(torch.empty(1), 1, tag=9).wait(timedelta(seconds=0.2)))
    isend(torch.ones(1), rank, tag=8)
    work.wait()
    until(then.done)
    with pytest.raises(RuntimeError, match="did not send a message"):
        then.wait()
    dist.send(torch.ones(1), 1)


def until(is_so: Any, within: float = 3.0) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + within
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def broken(rank: int, size: int) -> None:
    """A message of rank 0 stops in the middle: its others, which do not go to that rank, have no chance either."""
    wanted = [irecv(torch.empty(1), 2, tag=9), irecv(torch.empty(1), tag=9)] if rank == 0 else []
    dist.barrier()
    if rank > 0:
        return  # and live
    group: Any = dist.group.WORLD
    group.set_timeout(timedelta(seconds=0.3))
    found: list[BaseException] = []

    def wait() -> None:
        with pytest.raises(RuntimeError, match="in the middle of a message") as raised:
            wanted[0].wait()
        found.append(raised.value)

    thread = threading.Thread(target=wait)
    thread.start()
    with pytest.raises(CollectiveTimeout, match="did not take a message"):
        isend(torch.zeros(LARGE), 1, tag=5).wait()
    until(lambda: all(work.is_completed() for work in wanted))
    thread.join(3)
    assert found
    with pytest.raises(RuntimeError, match="in the middle of a message"):
        wanted[1].wait()


def threads(rank: int, size: int) -> int:
    """Two threads a peer and direction, random sizes and tags, random pauses: every message is what it should be."""
    found: list[int] = []
    failed: list[BaseException] = []

    def plan(sender: int, receiver: int) -> list[tuple[int, int]]:
        numbers = random.Random(sender * 64 + receiver)
        return [(numbers.choice((0, 3, 30_000, 200_000)), numbers.randrange(3)) for _ in range(60)]

    def send(other: int) -> None:
        works = []
        for number, (count, tag) in enumerate(plan(rank, other)):
            works.append(isend(made(rank + number, count), other, tag=tag))
            if number % 7 == 0:
                works.pop().wait()
        for work in works:
            work.wait()

    def receive(other: int) -> None:
        letters = sorted(enumerate(plan(other, rank)), key=lambda it: it[1][1] if other % 2 else -it[1][1])
        for number, (count, tag) in letters:
            tensor = torch.empty(count)
            work = irecv(tensor, other, tag=tag)
            time.sleep(random.choice((0, 0, 0.002)))
            work.wait()
            assert same(tensor, made(other + number, count)), (other, number)
            found.append(number)

    def run(function: Any, other: int) -> None:
        try:
            function(other)
        except BaseException as error:
            failed.append(error)

    others = [other for other in range(size) if other != rank]
    running = [threading.Thread(target=run, args=(it, other)) for it in (send, receive) for other in others]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(15)
    if failed:
        raise failed[0]
    dist.barrier()
    return len(found)
