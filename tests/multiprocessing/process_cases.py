"""What the processes of these tests run: importable by their name in every process."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import torchcrew.multiprocessing as mp

changed_by_the_parent = False


class Doubling(mp.Process):
    """A process class of the user's own."""

    def __init__(self, connection: Any, number: int) -> None:
        super().__init__(name="doubling", daemon=True)
        self.connection = connection
        self.number = number

    def run(self) -> None:
        self.connection.send(2 * self.number)


def nothing(*_: Any) -> None:
    """Return at once."""


def end(how: Any) -> None:
    """End with an exit code, by a signal, or by an exception."""
    if isinstance(how, int) and how < 0:
        os.kill(os.getpid(), -how)
        time.sleep(30)
    if how == "raise":
        raise ValueError("on purpose")
    sys.exit(how)


def report(connection: Any) -> None:
    """Send what a child can see of how it was started."""
    import multiprocessing

    parent = mp.parent_process()
    assert parent is not None
    connection.send(
        {
            "ours": mp.get_start_method(),
            "stock's": multiprocessing.get_start_method(),
            "context": type(mp.get_context()).__module__,
            "fresh": not changed_by_the_parent,
            "environment": os.environ.get("TORCHCREW_TEST"),
            "cwd": os.getcwd(),
            "parent": (parent.pid, parent.is_alive()),
            "name": mp.current_process().name,
            "daemon": mp.current_process().daemon,
            "group": os.getpgrp(),
            "threads": threading.active_count(),
            "stdin": sys.stdin.read(),
        }
    )


def nest(connection: Any, method: str) -> None:
    """Start a child and send its exit code, and what it sees."""
    ours, theirs = mp.Pipe()
    child = mp.get_context(method).Process(target=report, args=(theirs,))
    child.start()
    seen = ours.recv() if ours.poll(30) else None
    child.join(30)
    connection.send((child.exitcode, seen and seen["ours"], seen and seen["parent"][0] == os.getpid()))


def matmul(connection: Any) -> None:
    """Use both thread pools."""
    import numpy as np
    import torch

    (torch.ones(3000, 3000) + 1).exp_()
    np.ones((600, 600)) @ np.ones((600, 600))
    connection.send(torch.get_num_threads())


def linger(connection: Any = None) -> None:
    """Run until somebody ends it."""
    if connection is not None:
        connection.send(os.getpid())
    signal.pause()


def count_descriptors(connection: Any) -> None:
    """Send how many descriptors this process has."""
    connection.send(len(os.listdir("/proc/self/fd")))


def outlive(connection: Any) -> None:
    """Tell when the parent is gone, and go on."""
    parent = mp.parent_process()
    assert parent is not None
    connection.send(os.getpid())
    parent.join(30)
    connection.send("noticed")
    signal.pause()


def have_a_child(connection: Any, method: str) -> None:
    """Start one that would outlive this process."""
    mp.get_context(method).Process(target=outlive, args=(connection,)).start()
    signal.pause()
