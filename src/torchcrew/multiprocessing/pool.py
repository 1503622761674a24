"""`Pool`: the standard library's, with tensors that cost little and workers that may die.

    user's threads                pool's threads                                      workers
      map, apply, imap ─► queue ─► task thread ────► pool_tasks ──► one socket ──────► run
      results         ◄─────────── result thread ◄── pool_tasks ◄── one socket ◄────── send
                                   worker thread: starts, sees die, replaces ────────► (pidfds)

pool_crew.py    the threads and the workers: starting, replacing, ending
pool_tasks.py   the tasks that are out; which of them a dead worker had, and why none is lost or done twice
pool_worker.py  the two sockets and the shared page; the worker's loop
pool_results.py how a task's end reaches who waits for it

Death      a worker in a task: this task fails with `WorkerDied`; any worker: another is started.
           workers that cannot be started: `PoolBroken` for every task.
           this process: the workers end by themselves, or by the guardian.
Fork       in a child of this process the pool is not usable, and says so.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import pool as _typed
from multiprocessing import util
from multiprocessing.pool import ThreadPool
from typing import Any

import torch.multiprocessing.pool as _torchs

from torchcrew.multiprocessing.context import default_context
from torchcrew.multiprocessing.pool_crew import Crew
from torchcrew.multiprocessing.pool_results import reraise

__all__ = ("Pool", "ThreadPool")

_stock: Any = _typed
INIT, RUN, CLOSE, TERMINATE = _stock.INIT, _stock.RUN, _stock.CLOSE, _stock.TERMINATE


def __getattr__(name: str) -> Any:
    """What the standard library's module or torch's has and this one has not."""
    return getattr(_stock if hasattr(_stock, name) else _torchs, name)


class Pool(_typed.Pool):
    """A pool of worker processes; the standard library's, whose documentation holds.

    A CPU tensor in an argument or a result becomes shared, as with `torch.multiprocessing`. A worker that ends in the
    middle of a task, by whatever means, fails this task or chunk of tasks, at once and with `WorkerDied`; another takes
    its place, and no other task is lost or done twice.

    Args:
        processes: workers; as many as there are CPUs for None.
        initializer: called with ``initargs`` in every worker first. If it fails again and again, every task fails with
            `PoolBroken`, whose cause is the initializer's error.
        initargs: its arguments.
        maxtasksperchild: a worker is replaced after so many tasks or chunks.
        context: makes the processes.

    Raises:
        ValueError, TypeError: an argument makes no sense.
    """

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        maxtasksperchild: int | None = None,
        context: Any | None = None,
    ) -> None:
        self._pool: list[Any] = []  # for __del__, if this raises an exception
        self._state = INIT
        if processes is None:
            processes = getattr(os, "process_cpu_count", os.cpu_count)() or 1
        if processes < 1:
            raise ValueError("Number of processes must be at least 1")
        if maxtasksperchild is not None and (not isinstance(maxtasksperchild, int) or maxtasksperchild <= 0):
            raise ValueError("maxtasksperchild must be a positive int or None")
        if initializer is not None and not callable(initializer):
            raise TypeError("initializer must be a callable")
        self._ctx = context or default_context.get_context()
        options = (initializer, initargs, maxtasksperchild, self._wrap_exception)
        self._crew = crew = Crew(self._ctx, self.Process, processes, options)
        self._pool, self._cache, self._taskqueue = crew.pool, crew.cache, crew.tasks
        try:
            self._repopulate_pool()
        except BaseException:
            crew.give_up()
            raise
        crew.start_threads()
        self._worker_handler, self._task_handler, self._result_handler = crew.threads
        self._terminate = util.Finalize(self, crew.terminate, exitpriority=15)
        self._state = RUN

    _wrap_exception = True

    @property
    def _processes(self) -> int:
        return self._crew.processes

    @_processes.setter
    def _processes(self, processes: int) -> None:
        self._crew.processes = processes

    def _repopulate_pool(self) -> None:
        self._crew.populate()

    def __del__(self, _warn: Any = warnings.warn, RUN: str = RUN, _getpid: Any = os.getpid) -> None:
        if self._state == RUN and self._crew.owner == _getpid():
            _warn(f"unclosed running multiprocessing pool {self!r}", ResourceWarning, source=self)
            self._crew.bell.ring()

    def _check_running(self) -> None:
        if self._state != RUN:
            raise ValueError("Pool not running")
        if self._crew.owner != os.getpid():
            raise ValueError(f"Pool not running in this process: it belongs to process {self._crew.owner}, its parent")

    def _guarded_task_generation(
        self, result_job: int, func: Any, iterable: Iterable[Any], expected: int = 0
    ) -> Iterator[Any]:
        index = -1
        try:
            for index, item in enumerate(iterable):
                yield result_job, index, func, (item,), {}
        except GeneratorExit:
            raise
        except BaseException as error:
            index += 1
            yield result_job, index, reraise, (error,), {}
        for missing in range(index + 1, expected):
            yield result_job, missing, reraise, (ValueError("the iterable has fewer items than its length"),), {}

    def _map_async(
        self,
        func: Any,
        iterable: Any,
        mapper: Any,
        chunksize: int | None = None,
        callback: Any = None,
        error_callback: Any = None,
    ) -> Any:
        self._check_running()
        if not hasattr(iterable, "__len__"):
            iterable = list(iterable)
        if len(iterable) == 0:
            chunksize = 0
        elif chunksize is None:  # stock asks how many live just now, which may be none
            chunksize = -(-len(iterable) // (self._processes * 4))
        batches = _stock.Pool._get_tasks(func, iterable, chunksize)
        result = _stock.MapResult(self, chunksize, len(iterable), callback, error_callback=error_callback)
        tasks = self._guarded_task_generation(result._job, mapper, batches, result._number_left)
        self._taskqueue.put((tasks, None))
        return result

    def close(self) -> None:
        """Take no more tasks; the workers end when all is done."""
        if self._state == RUN:
            self._state = CLOSE
            if self._crew.owner == os.getpid():
                self._crew.state = CLOSE
                self._crew.bell.ring()

    def terminate(self) -> None:
        """End the workers now; who waits for a result gets a RuntimeError."""
        self._state = TERMINATE
        self._terminate()

    def join(self) -> None:
        """Wait for the workers to end, after `close` or `terminate`."""
        if self._state == RUN:
            raise ValueError("Pool is still running")
        if self._state not in (CLOSE, TERMINATE):
            raise ValueError("In unknown state")
        self._crew.join()
