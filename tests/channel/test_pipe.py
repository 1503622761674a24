"""`torchcrew.Pipe`: snapshots there and back; what its ends see when the other side closes or dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import threading
import time
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch

import torchcrew
from tests.channel.queue_cases import echo_pipe, make_process, message, number_of

SMALL, LARGE = 5, 10_000


@pytest.mark.parametrize("elements", [0, SMALL, LARGE])
def test_there_and_back(elements: int) -> None:
    """What arrives is a snapshot, the receiver's own."""
    one, other = torchcrew.Pipe()
    tensor = torch.arange(elements)
    one.send([tensor, "text"])
    tensor.fill_(-1)
    got, text = other.recv()
    assert text == "text"
    assert torch.equal(got, torch.arange(elements))
    other.send(got)
    assert torch.equal(one.recv(), got)


def test_one_way() -> None:
    """The first end receives, the second sends, as the standard library's."""
    reader, writer = torchcrew.Pipe(duplex=False)
    assert (reader.readable, reader.writable, writer.readable, writer.writable) == (True, False, False, True)
    writer.send(message(1, LARGE))
    assert number_of(reader.recv()) == 1
    with pytest.raises(OSError, match="only receives"):
        reader.send(1)
    with pytest.raises(OSError, match="only sends"):
        writer.recv()


def test_a_shared_tensor_stays_shared() -> None:
    """Its descriptor travels."""
    one, other = torchcrew.Pipe()
    shared = torch.zeros(3).share_memory_()
    one.send(shared)
    other.recv()[0] = 5
    assert shared[0] == 5


@pytest.mark.timeout(60)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver", "zygote"])
def test_start_methods(method: str) -> None:
    """A child of every kind; it sees the end when this side is closed."""
    ours, theirs = torchcrew.Pipe()
    child = make_process(method, echo_pipe, theirs)
    child.start()
    theirs.close()
    for number, elements in enumerate((SMALL, LARGE, 1_000_000)):
        ours.send(message(number, elements))
        assert number_of(ours.recv()) == number
    if method != "fork":  # a forked child has a copy of our end, too
        ours.close()
        child.join()
        assert child.exitcode == 0
    child.kill()
    child.join()


def test_the_end_is_delivered_after_what_was_sent() -> None:
    """Closing the only copy of an end."""
    one, other = torchcrew.Pipe()
    one.send(message(1, LARGE))
    one.close()
    assert other.poll()
    assert number_of(other.recv()) == 1
    assert other.poll()
    for _ in range(2):
        with pytest.raises(EOFError):
            other.recv()
        with pytest.raises(BrokenPipeError):
            other.send(1)
        with pytest.raises(BrokenPipeError):
            other.send(torch.ones(LARGE))


def test_a_closed_end() -> None:
    """Closing twice is no error; anything else is."""
    one, other = torchcrew.Pipe()
    with one:
        pass
    one.close()
    assert one.closed
    assert not other.closed
    for call in (lambda: one.send(1), one.recv, one.poll):
        with pytest.raises(OSError, match="closed"):
            call()


def send_and_die(end: Any, count: int) -> None:
    for number in range(count):
        end.send(message(number, LARGE))
    os.kill(os.getpid(), 9)


@pytest.mark.parametrize("method", ["fork", "zygote"])
def test_the_other_side_dies(method: str) -> None:
    """At once, though this process never closed its copy of the child's end: first what was sent, then the end."""
    ours, theirs = torchcrew.Pipe()
    child = make_process(method, send_and_die, theirs, 2)
    child.start()
    got = [ours.recv(), ours.recv()]
    with pytest.raises(EOFError):
        ours.recv()
    assert ours.poll()
    assert [number_of(each) for each in got] == [0, 1]
    child.join()
    assert child.exitcode == -9
    assert not theirs.closed


def test_the_other_side_dies_while_send_waits() -> None:
    """For room in the socket, and for memory."""
    for obj in (b"x" * 30_000, torch.ones(60_000)):
        ours, _theirs = torchcrew.Pipe(memory_budget="1MB")
        child = make_process("fork", time.sleep, 0.3)
        child.start()
        with pytest.raises(BrokenPipeError):
            send_often(ours, obj)
        child.join()
        assert child.exitcode == 0


def send_often(end: Any, obj: Any) -> None:
    for _ in range(10_000):
        end.send(obj)


def test_another_thread_may_use_the_other_end() -> None:
    """Then the death of a child that had both ends is no end."""
    one, other = torchcrew.Pipe()
    child = make_process("fork", time.sleep, 0)
    child.start()
    child.join()
    late = threading.Timer(0.2, other.send, [7])
    late.start()
    assert one.recv() == 7
    late.join()
    assert child.exitcode == 0


def test_poll() -> None:
    """At once, for a time, and for as long as it takes."""
    one, other = torchcrew.Pipe()
    assert not one.poll()
    assert not one.poll(0.02)
    late = threading.Timer(0.05, other.send, [1])
    late.start()
    assert one.poll(None)
    assert one.poll(5)
    assert wait([one], 1) == [one]
    assert one.recv() == 1
    late.join()


def test_memory_returns_from_a_killed_receiver() -> None:
    """What it held, as soon as nobody has it."""
    ours, theirs = torchcrew.Pipe(memory_budget="800kB")
    for _ in range(3):
        child = make_process("fork", hold_three, theirs)
        child.start()
        for number in range(3):
            ours.send(message(number, 20_000))  # not more: torch would start threads, which a fork does not bear
        assert ours.recv() == "held"
        child.kill()
        child.join()
        assert child.exitcode == -9


def hold_three(end: Any) -> None:
    held = [end.recv() for _ in range(3)]
    assert [number_of(got) for got in held] == [0, 1, 2]
    end.send("held")
    time.sleep(60)


def test_coroutines() -> None:
    """Both directions at once, with a full socket in between."""

    async def main() -> None:
        one, other = torchcrew.Pipe()

        async def send_all(end: Any) -> None:
            for number in range(400):
                await end.asend(message(number, 1_000))
            end.close()

        async def count(end: Any) -> int:
            number = 0
            with contextlib.suppress(EOFError):
                while number_of(await end.arecv()) == number:
                    number += 1
            return number

        sending = asyncio.create_task(send_all(one))
        await asyncio.sleep(0.05)
        assert await count(other) == 400
        await sending
        again, _ = torchcrew.Pipe()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(again.arecv(), 0.02)

    asyncio.run(main())


def test_it_pickles_only_for_a_process() -> None:
    """As the standard library's connections do not, ours do not: a pipe is given to a process when that is made."""
    with pytest.raises(RuntimeError, match="inheritance"):
        pickle.dumps(torchcrew.Pipe()[0])
