"""What processes in the tests of `torchcrew.Queue` and `torchcrew.Pipe` run: importable by all start methods."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

import torchcrew
from torchcrew.crew import zygote


def make_process(method: str, target: Any, *args: Any) -> Any:
    """A process object of a start method."""
    return context_of(method).Process(target=target, args=args)


def context_of(method: str) -> Any:
    """The context of a start method."""
    if method == "zygote":
        return zygote.get_context()
    return torchcrew.multiprocessing.get_context(method)


def message(number: int, elements: int) -> dict[str, Any]:
    """A message whose every element says which it is."""
    return {"number": number, "data": torch.full((elements,), number), "small": torch.tensor([number])}


def number_of(got: dict[str, Any]) -> int:
    """The number of a message, after a look at every element."""
    number: int = got["number"]
    assert (got["data"] == number).all(), f"message {number} shows other bytes"
    assert got["small"].tolist() == [number]
    return number


def put_all(queue: Any, numbers: range, elements: int) -> None:
    """Put these messages."""
    for number in numbers:
        queue.put(message(number, elements))


def put_and_die(queue: Any, numbers: range, elements: int) -> None:
    """Put these messages, and be killed."""
    put_all(queue, numbers, elements)
    os.kill(os.getpid(), signal.SIGKILL)


def echo(inbox: Any, outbox: Any) -> None:
    """Send back what comes, until the queue is closed."""
    for obj in inbox:
        outbox.put(obj)
    outbox.close()


def echo_pipe(end: Any) -> None:
    """Send back what comes, until the other side is gone."""
    while True:
        try:
            obj = end.recv()
        except EOFError:
            return
        end.send(obj)


def nested(queue: Any, method: str, depth: int) -> None:
    """Put from a child of a child."""
    if depth == 0:
        queue.put(message(7, 10_000))
        return
    child = make_process(method, nested, queue, method, depth - 1)
    child.start()
    child.join()


def collect(queue: Any, out: Any, hold: int) -> None:
    """Receive until the queue is closed, hold some, and send the numbers."""
    held: list[Any] = []
    numbers = []
    for got in queue:
        numbers.append(number_of(got))
        held = [*held, got][-hold:] if hold else []
        for old in held:
            number_of(old)
        del got
    out.put(numbers)


def hold_and_sleep(queue: Any, ready: Any, count: int) -> None:
    """Receive, hold all, and do nothing more."""
    held = [queue.get() for _ in range(count)]
    ready.put(len(held))
    time.sleep(60)


def wait_for_message(queue: Any) -> None:
    """Wait in `get` for what never comes."""
    queue.get()


def end_with(code: int) -> None:
    """Exit."""
    os._exit(code)
