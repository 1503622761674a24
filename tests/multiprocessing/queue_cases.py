"""What the processes of the tests of queues and pipes run: importable by their name in every process."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch

import torchcrew.multiprocessing as mp

#: More packets than a socket holds.
MANY = 6000


def echo(source: Any, target: Any) -> None:
    """Send back what comes, until None."""
    while (item := source.get()) is not None:
        target.put(item)


def echo_connection(connection: Any) -> None:
    """The same over a pipe, until "end"."""
    while not isinstance(item := connection.recv(), str) or item != "end":
        connection.send(item)


def add_one(source: Any, target: Any) -> None:
    """Add 1 to each tensor that comes, and say so."""
    while (item := source.get()) is not None:
        item.add_(1)
        target.put("added")
        del item


def put_all(queue: Any, items: list[Any]) -> None:
    """Put these, and return."""
    for item in items:
        queue.put(item)


def put_tensors(queue: Any, number: int) -> None:
    """Put tensors that nobody else has, and return."""
    for index in range(number):
        queue.put(torch.full((100,), float(index)))


def put_many(queue: Any, number: int = MANY) -> None:
    """Put more than the socket holds, and return: the process ends when all is sent."""
    for index in range(number):
        queue.put(index)


def put_many_and_leave(queue: Any) -> None:
    """The same, without waiting for them to be sent."""
    queue.cancel_join_thread()
    put_many(queue)


def put_in_grandchild(queue: Any, method: str) -> None:
    """Have a child put something."""
    process = mp.get_context(method).Process(target=put_all, args=(queue, ["grandchild"]))
    process.start()
    process.join()


def work_off(queue: Any) -> None:
    """Take tasks out and mark them as done, until None, which is one, too."""
    while True:
        item = queue.get()
        queue.task_done()
        if item is None:
            return


def end(how: Any, *_: Any) -> None:
    """End with an exit code, or by a signal."""
    if how < 0:
        os.kill(os.getpid(), -how)
        time.sleep(30)
    sys.exit(how)


def end_when_told(gate: Any, how: Any, *_: Any) -> None:
    """The same, after something came through ``gate``."""
    gate.recv()
    end(how)


def live_until_told(gate: Any, *_: Any) -> None:
    """Hold what was given until something comes, or the end."""
    try:
        gate.recv()
    except EOFError:
        return


def put_and_die(queue: Any, item: Any) -> None:
    """Put something, and be killed at once."""
    queue.put(item)
    os.kill(os.getpid(), signal.SIGKILL)


def get_and_die(queue: Any) -> None:
    """Take something out, and be killed."""
    queue.get()
    os.kill(os.getpid(), signal.SIGKILL)


def square(number: int) -> int:
    """The work of pools."""
    return number * number


def stop_in_put(queue: Any) -> None:
    """Be stopped with the lock of those who put."""
    with queue._mailbox.putting, queue._mailbox.record:
        os.kill(os.getpid(), signal.SIGSTOP)
