"""Pools: tasks that take and return tensors, and the smallest of tasks.

    python -m benchmarks.pool [--repeats N]

Two workers, forked, one task at a time (`imap`, chunks of one). Stock is ``torch.multiprocessing.Pool``, ours
``torchcrew.multiprocessing.Pool``. A repeat is one pool: it is warmed by a few tasks, then so many are timed. Every
result is compared with what it should be, in a run of its own. The floor is the same work in this process.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.multiprocessing

import torchcrew.multiprocessing
from benchmarks import harness
from benchmarks.harness import IN_PROCESS, OURS, STOCK, Claim, Measurement, Row

WORKERS = 2
WARM_UP = 20
KB = 1 << 10

#: Key, what it says, function, bytes of its tensor, tasks in a repeat, ratio to reach.
Case = tuple[str, str, Callable[[Any], Any], int, int, float]


def make(task: tuple[int, int]) -> torch.Tensor:
    """A new tensor of so many bytes."""
    number, nbytes = task
    return torch.full((nbytes // 4,), float(number))


def total(task: tuple[int, torch.Tensor]) -> float:
    """Read a tensor."""
    return float(task[1].sum())


def square(task: tuple[int, int]) -> int:
    return task[0] * task[0]


CASES: tuple[Case, ...] = (
    ("pool_returns_16kb", "`Pool`, a task that returns a tensor of 16 KB", make, 16 * KB, 300, 4),
    ("pool_returns_1mb", "`Pool`, a task that returns a tensor of 1 MB", make, 1024 * KB, 200, 2),
    ("pool_takes_16kb", "`Pool`, a task that takes a tensor of 16 KB", total, 16 * KB, 300, 4),
    ("pool_ints", "`Pool`, a task that takes and returns an int", square, 0, 5000, 1),
)


def main() -> None:
    torch.set_num_threads(1)  # OpenMP in this process would hang it in forked ones
    warnings.filterwarnings("ignore", "fork of a process with")  # the idle threads of the machine's BLAS
    bench = harness.Benchmark("pool", str(__doc__))
    for key, work, function, nbytes, count, at_least in CASES:
        engines = {
            STOCK: torch.multiprocessing.get_context("fork").Pool,
            OURS: torchcrew.multiprocessing.get_context("fork").Pool,
            IN_PROCESS: None,
        }
        wanted: list[str] = []
        for name, pool in engines.items():
            found = _digests(pool, function, nbytes, count)
            wanted = wanted or found
            harness.compare(name, found, wanted)
        timed = {name: partial(_time, pool, function, nbytes, count) for name, pool in engines.items()}
        more_or_same = "no slower than stock" if at_least == 1 else f"at least {at_least:.0f} times faster than stock"
        bench.add(
            Row(
                key=key,
                work=work,
                metric="task_s",
                per="task",
                measured=harness.alternate(timed, bench.repeats),
                claims=[Claim(more_or_same, at_least=at_least)],
                floor=IN_PROCESS,
                verified=harness.verdict(list(engines), wanted),
            )
        )
    bench.finish()


def _tasks(function: Callable[[Any], Any], nbytes: int, count: int) -> list[Any]:
    numbers = range(count)
    return [(n, torch.full((nbytes // 4,), float(n)) if function is total else nbytes) for n in numbers]


def _digests(make_pool: Any, function: Callable[[Any], Any], nbytes: int, count: int) -> list[str]:
    tasks = _tasks(function, nbytes, count)
    if make_pool is None:
        return [harness.digest(function(task)) for task in tasks]
    with make_pool(WORKERS) as pool:
        return [harness.digest(result) for result in pool.imap(function, tasks)]


def _time(make_pool: Any, function: Callable[[Any], Any], nbytes: int, count: int) -> Measurement:
    tasks = _tasks(function, nbytes, WARM_UP + count)
    gc.collect()
    if make_pool is None:
        return {"task_s": _time_all(map(function, tasks[WARM_UP:]), count)}
    with make_pool(WORKERS) as pool:
        for _ in pool.imap(function, tasks[:WARM_UP]):
            pass
        return {"task_s": _time_all(pool.imap(function, tasks[WARM_UP:]), count)}


def _time_all(results: Any, count: int) -> float:
    started = time.perf_counter()
    for _ in results:
        pass
    return (time.perf_counter() - started) / count


if __name__ == "__main__":
    main()
