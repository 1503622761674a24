"""`Link`: one packet for any number of ranks, and what becomes of it at the other side."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.launcher import launch_cases as cases
from torchcrew.launcher.link import Close, Failed, Link, Returned, Run


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    """Both in this process."""
    ours, theirs = Link.pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def through(ends: tuple[Link, Link], message: Any) -> Any:
    """A message at the other side."""
    ends[0].send(Link.pack(message))
    return ends[1].receive()


def test_every_message(ends: tuple[Link, Link]) -> None:
    """Arrives as what it was, in its order; and nothing where there is none."""
    assert ends[1].receive() is None
    messages = [Run(1, True, max, (1, 2), {"key": len}), Returned(1, "value", False), Failed(), Close()]
    for message in messages[:2]:
        ends[0].send(Link.pack(message))
    assert ends[1].wait()
    assert [ends[1].receive() for _ in range(2)] == messages[:2]
    assert through(ends, messages[2]) == messages[2]
    assert through(ends[::-1], messages[3]) == messages[3]
    assert ends[1].receive() is None


@pytest.mark.parametrize("count", [0, 10, 10_000, 1_000_000])
def test_one_packet_for_many(count: int) -> None:
    """What one receiver writes into its tensor no other sees, whether it came in the packet or in a memfd."""
    pairs = [Link.pair() for _ in range(3)]
    packed = Link.pack(Run(1, False, cases.nothing, (torch.zeros(count),)))
    for ours, _ in pairs:
        ours.send(packed)
    del packed
    received: list[Any] = []
    for number, (_, theirs) in enumerate(pairs):
        message: Any = theirs.receive()
        message.args[0].fill_(number)
        received.append(message)
    for number, message in enumerate(received):
        assert message.args[0].eq(number).all()
    for ours, theirs in pairs:
        ours.close()
        theirs.close()


def test_functions_without_a_name(ends: tuple[Link, Link]) -> None:
    """Lambdas and closures go by value, others by reference."""
    word = "closed over"
    message = through(ends, Run(1, False, lambda: word, (cases.who,)))
    assert message.fn() == word
    assert message.args[0] is cases.who


def test_more_descriptors_than_fit_in_a_packet(ends: tuple[Link, Link]) -> None:
    """Shared tensors, each with one."""
    tensors = [torch.full((1,), number).share_memory_() for number in range(300)]
    received = through(ends, Returned(1, tensors, True)).value
    received[299].fill_(-1)
    assert tensors[299].item() == -1
    assert [int(one) for one in received[:299]] == list(range(299))
    del received
    gc.collect()


def test_what_may_only_be_given_to_a_starting_process(ends: tuple[Link, Link]) -> None:
    """Queues, locks and ends of pipes may be sent, and nothing is left in place that would allow it elsewhere."""
    context = multiprocessing.get_context("spawn")
    lock, queue = context.Lock(), context.SimpleQueue()
    message = through(ends, Run(1, False, cases.nothing, (lock, queue)))
    with message.args[0]:
        assert not lock.acquire(block=False)
    message.args[1].put("through it")
    assert queue.get() == "through it"
    assert multiprocessing.context.get_spawning_popen() is None  # type: ignore[attr-defined]
    queue.close()
    message.args[1].close()


@pytest.mark.parametrize(
    "what", [threading.Lock(), (number for number in ()), sys.stdout], ids=["lock", "generator", "file"]
)
def test_what_cannot_be_sent(ends: tuple[Link, Link], what: Any) -> None:
    """Pickle's error; a note says what went by value; nothing is sent, nothing stays behind."""
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TypeError, match="cannot pickle") as caught:
        Link.pack(Run(1, False, lambda: what, ()))
    assert any("lambda" in note for note in getattr(caught.value, "__notes__", ["lambda"]))
    assert ends[1].receive() is None
    assert multiprocessing.context.get_spawning_popen() is None  # type: ignore[attr-defined]
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_end(ends: tuple[Link, Link]) -> None:
    """What was sent before is received, then comes `EOFError`; sending raises."""
    ends[0].send(Link.pack(Close()))
    ends[0].close()
    ends[0].close()
    assert ends[0].fileno() == -1
    assert isinstance(ends[1].receive(), Close)
    assert ends[1].wait()
    with pytest.raises(EOFError):
        ends[1].receive()
    with pytest.raises(OSError, match=r"."):
        ends[1].send(Link.pack(Close()))


def test_waiting_ends_with_another_descriptor(ends: tuple[Link, Link]) -> None:
    """As a pidfd; what is to be received goes first."""
    read, write = os.pipe()
    os.write(write, b"x")
    assert ends[1].wait(read) is False
    ends[0].send(Link.pack(Close()))
    assert ends[1].wait(read) is True
    os.close(read)
    os.close(write)
