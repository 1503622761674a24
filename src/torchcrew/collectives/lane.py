"""The order of a group's collectives: one after the other, as they are called, in whichever thread.

    caller, sync    ── nothing is pending ──► runs it itself
                    ── else ────────────────► behind the others ──► waits
    caller, async   ────────────────────────► queue ──► thread of the group ──► work ──► its callbacks: a thread

Owner      of the threads: the group; each is started by the first that needs it, ended by `close`.
Death      an error of an asynchronous call is raised by its `wait`; those behind it find a broken group.
Callbacks  of a future that was asked for before its end have a thread of their own: they may call collectives, and wait
           for them.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import torch

from torchcrew.collectives.work import GroupWork

__all__ = ("Lane", "end_all")

#: Seconds that what is pending has when the interpreter ends.
_AT_EXIT = 1.0


class _Worker:
    """A thread that runs jobs in their order."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def put(self, job: Callable[[], None]) -> None:
        """Have a job run, behind those before it."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("this process group has been destroyed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._jobs.put(job)

    def _work(self) -> None:
        torch.set_grad_enabled(False)
        while (job := self._jobs.get()) is not None:
            job()
            del job

    def close(self, timeout: float) -> bool:
        """Take no more jobs, and wait until those before have run; False if they have not within ``timeout``."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._jobs.put(None)
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return thread is None
        thread.join(timeout)
        return not thread.is_alive()


class Lane:
    """Runs jobs in their order.

    Args:
        name: of the threads.
    """

    def __init__(self, name: str) -> None:
        self._running = threading.Lock()
        self._runner = 0  # the thread that has it
        self._counting = threading.Lock()
        self._pending = 0
        self._worker = _Worker(name)
        self._name = name
        self._callbacks: list[threading.Thread] = []
        _lanes.add(self)

    def run(self, job: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run a job, behind those that were submitted; raises what it raises."""
        if self._pending:
            done: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
            self._enqueue(job, args, options, lambda result, error: done.put((result, error)))
            result, error = done.get()
            if error is not None:
                raise error
            return result
        with self._turn():
            return job(*args, **options)

    def submit(self, result: list[Any], job: Callable[..., Any], *args: Any, **options: Any) -> GroupWork:
        """Run a job in the group's thread; what is returned has ``result`` then, or raises what the job has raised."""
        work = GroupWork(result)
        self._enqueue(job, args, options, lambda _, error: work.end(error, tell=self._call_back))
        return work

    def _call_back(self, job: Callable[[], None]) -> None:
        """Run the callbacks of a future, which may call collectives and wait for the futures of those."""
        thread = threading.Thread(target=job, name=f"{self._name}-callback", daemon=True)
        self._callbacks = [other for other in self._callbacks if other.is_alive()] + [thread]
        thread.start()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        with self._running:
            self._runner = threading.get_ident()
            try:
                yield
            finally:
                self._runner = 0

    def _enqueue(self, job: Callable[..., Any], args: Any, options: Any, done: Callable[[Any, Any], None]) -> None:
        def run() -> None:
            result, error = None, None
            try:
                with self._turn():
                    result = job(*args, **options)
            except BaseException as raised:
                error = raised
            with self._counting:
                self._pending -= 1
            done(result, error)

        with self._counting:
            self._worker.put(run)
            self._pending += 1

    def close(self, timeout: float) -> bool:
        """End the threads, when they have done what is pending; False if that is not within ``timeout``."""
        until = time.monotonic() + timeout
        if not self._worker.close(timeout):
            return False
        for thread in self._callbacks:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        return True

    @contextlib.contextmanager
    def nobody_runs(self, timeout: float) -> Iterator[bool]:
        """While this lasts no job is begun; False if one still runs after ``timeout``, or in this very thread."""
        is_free = self._runner != threading.get_ident() and self._running.acquire(timeout=timeout)
        try:
            yield is_free
        finally:
            if is_free:
                self._running.release()


_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()


@atexit.register
def end_all() -> None:
    """Have what is pending end before the interpreter does.

    It stops other threads where they ask for its lock: inside a function of torch that is in C++, which aborts the
    process. Where a thread waits for its peers it does no harm.
    """
    for lane in list(_lanes):
        lane.close(_AT_EXIT)
