"""The order of a group's collectives: one after the other, as they are called, in whichever thread.

    caller, sync    ── nothing is pending ──► runs it itself
                    ── else ────────────────► behind the others ──► waits
    caller, async   ────────────────────────► queue ──► thread of the group ──► work

Owner      of the thread: the group; started by the first asynchronous call, ended by `close`.
Death      an error of an asynchronous call is raised by its `wait`; those behind it find a broken group.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

from torchcrew.collectives.work import GroupWork

__all__ = ("Lane", "end_all")

#: Seconds that each thread has when the interpreter ends.
_AT_EXIT = 1.0


class Lane:
    """Runs jobs in their order.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._running = threading.Lock()
        self._counting = threading.Lock()
        self._pending = 0
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, job: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run a job, behind those that were submitted; raises what it raises."""
        if self._pending:
            done: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
            self._enqueue(job, args, options, lambda result, error: done.put((result, error)))
            result, error = done.get()
            if error is not None:
                raise error
            return result
        with self._running:
            return job(*args, **options)

    def submit(self, result: list[Any], job: Callable[..., Any], *args: Any, **options: Any) -> GroupWork:
        """Run a job in the group's thread; what is returned has ``result`` then, or raises what the job has raised."""
        work = GroupWork(result)
        self._enqueue(job, args, options, lambda _, error: work.end(error))
        return work

    def _enqueue(self, job: Callable[..., Any], args: Any, options: Any, done: Callable[[Any, Any], None]) -> None:
        def run() -> None:
            result, error = None, None
            try:
                with self._running:
                    result = job(*args, **options)
            except BaseException as raised:
                error = raised
            with self._counting:
                self._pending -= 1
            done(result, error)

        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
            _lanes.add(self)
        with self._counting:
            self._pending += 1
            self._jobs.put(run)

    def _work(self) -> None:
        torch.set_grad_enabled(False)
        while (job := self._jobs.get()) is not None:
            job()
            del job

    def close(self, timeout: float) -> bool:
        """End the thread, when it has done what is pending; False if ``timeout`` was over before, or a job runs."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._jobs.put(None)
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
            self._thread = None
        if not self._running.acquire(timeout=0):
            return False
        self._running.release()
        return True


_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()


@atexit.register
def end_all() -> None:
    """Have what is pending end before the interpreter does.

    It stops other threads where they ask for its lock: inside a function of torch that is in C++, and aborts the
    process. Where a thread waits for its peers it is not.
    """
    for lane in list(_lanes):
        lane.close(_AT_EXIT)
