"""What the workers of the pool tests run: importable by their name in every process."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import torchcrew.multiprocessing as mp
from tests.multiprocessing.fault_cases import end

#: Set by `remember`, the initializer of some pools.
remembered: Any = None


def square(number: int) -> int:
    return number * number


def add(one: int, other: int = 10) -> int:
    return one + other


def fail(number: int) -> None:
    raise KeyError(number)


def fail_at_three(number: int) -> int:
    if number == 3:
        raise ValueError("three")
    return number


def pid_after(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def remember(value: Any) -> None:
    global remembered
    remembered = value


def recall(_: Any) -> Any:
    return remembered


def identity(value: Any) -> Any:
    return value


def fill(tensor: torch.Tensor, number: float) -> bool:
    """Write to a tensor; whether it was shared."""
    tensor.fill_(number)
    return tensor.is_shared()


def two_views(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    base = torch.arange(float(count))
    return base, base[1:]


def many_tensors(count: int) -> list[torch.Tensor]:
    return [torch.full((2,), float(number)) for number in range(count)]


def a_lambda(_: Any) -> Any:
    return lambda: None


class Stubborn(Exception):
    """Can be pickled and not unpickled."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def raise_stubborn(_: Any) -> None:
    raise Stubborn(1, 2)


class Unloadable:
    """Raises where it is unpickled."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


def make_pool(_: Any) -> None:
    mp.get_context("fork").Pool(1)


def fork_and_return(_: Any) -> int:
    """Come back twice."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
    return pid


def end_at_three(number: int, how: str = "SIGKILL") -> int:
    if number == 3:
        end(how)
    return number


def end_in_chunk(chunk_start: int) -> int:
    if chunk_start == 45:
        end("SIGKILL")
    return chunk_start


def raise_in_initializer(text: str) -> None:
    raise ValueError(text)


def end_in_initializer(how: str) -> None:
    end(how)


def end_at_first(flag: str, how: str) -> None:
    """End in one of the ways, in the first process that comes here."""
    if first(flag):
        end(how)


def first(flag: str) -> bool:
    """Whether this is the first process that asks; survives its death."""
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def note(folder: str, number: int) -> int:
    """Leave one file for each time it is called."""
    Path(folder, f"{number}-{os.getpid()}-{time.monotonic_ns()}").touch()
    return number


def note_with(task: tuple[Any, ...]) -> int:
    """The same, and look at what comes with it."""
    folder, number, tensor, data = task
    assert len(tensor) == len(data)
    return note(folder, number)


def few_descriptors() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64 if hard == resource.RLIM_INFINITY else min(64, hard)))


def count_call(number: int) -> int:
    """Count this call in the memory that all workers were given."""
    remembered[number] += 1
    return number


def say_and_sleep(path: str, seconds: float = 60) -> None:
    Path(path).touch()
    time.sleep(seconds)


def ignore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def interrupted_program() -> None:
    """Hang in a map, for Ctrl-C."""
    with mp.get_context("fork").Pool(2) as pool:
        pool.map_async(square, range(10)).get()
        os.write(1, b"ready\n")
        pool.map(time.sleep, [60] * 8, 1)


if __name__ == "__main__":
    sys.exit(interrupted_program())
