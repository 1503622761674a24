"""What the processes of `test_stacks.py` and `test_hang.py` do while they are asked: importable everywhere."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
import time
from typing import Any

import torch


def sleep_in_python(ready: Any) -> None:
    ready.set()
    time.sleep(60)


def read_a_pipe(ready: Any) -> None:
    ready.set()
    os.read(os.pipe()[0], 1)


def hold_the_interpreter(ready: Any) -> None:
    """Native code that keeps the lock, and never looks for signals: backtracking over 2**60 ways takes for ever."""
    ready.set()
    while True:
        ctypes.PyDLL(None).sleep(60)


def match_for_ever(ready: Any) -> None:
    ready.set()
    re.match("(a+)+$", "a" * 60 + "b")


def compute_in_python(ready: Any) -> None:
    ready.set()
    while True:
        pass


def wait_in_a_thread(ready: Any) -> None:
    def waiting() -> None:
        ready.set()
        time.sleep(60)

    thread = threading.Thread(target=waiting, daemon=True)
    thread.start()
    thread.join()


def block_the_signal(ready: Any, signum: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signum})
    ready.set()
    time.sleep(60)


def become_another_program(ready: Any) -> None:
    ready.set()
    os.execv("/bin/sleep", ["sleep", "60"])


def close_everything(ready: Any) -> None:
    """What daemons do; and another file gets the number."""
    ready.set()
    os.closerange(3, 256)
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(60)]
    time.sleep(60)
    del files


def fork_and_wait(ready: Any, pids: Any) -> None:
    """Fork without a word, as user code does."""
    pid = os.fork()
    if not pid:
        ready.set()
        time.sleep(60)
        os._exit(0)
    pids.put(pid)
    os.waitpid(pid, 0)


class Method:
    """Its methods wait."""

    def wait(self, ready: Any) -> None:
        ready.set()
        time.sleep(60)

    def deeper(self, ready: Any, levels: int) -> None:
        if levels:
            self.deeper(ready, levels - 1)
        else:
            self.wait(ready)


def wait_deep_down(ready: Any) -> None:
    Method().deeper(ready, 150)


class SlowDataset(torch.utils.data.Dataset[int]):
    """Its second item never comes."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 1:
            time.sleep(60)
        return index


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def count(ready: Any, value: Any, times: int) -> None:
    """Work that asking must not disturb."""
    ready.set()
    for _ in range(times):
        time.sleep(0.0005)
        with open("/proc/self/stat") as file:
            file.read()
        value.value += 1


def trying_a_lock(ready: Any) -> None:
    """A lock that is taken is tried again and again, and must never be had."""
    lock = threading.Lock()
    lock.acquire()
    ready.set()
    while not lock.acquire(False):
        pass


def busy_threads(ready: Any) -> None:
    """Python code in several threads, which come and go."""

    def work(depth: int) -> int:
        return sum(work(depth - 1) for _ in range(2)) if depth else 1

    ready.set()
    while True:
        threads = [threading.Thread(target=work, args=(7,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
