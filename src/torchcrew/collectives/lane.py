"""The order of a group's collectives: one after the other, as they are called, in whichever thread.

    caller, sync    ── nothing is pending ──► runs it itself
                    ── else ────────────────► behind the others ──► waits
    caller, async   ────────────────────────► queue ──► thread of the group ──► future

Owner      of the thread: the group; started by the first asynchronous call, ended by `close`.
Death      an error of an asynchronous call is raised by its future; those behind it find a broken group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from torch.futures import Future

__all__ = ("Lane",)


class Lane:
    """Runs jobs in their order.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._running = threading.Lock()
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

    def submit(self, result: Any, job: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
        """Run a job in the group's thread; the future has ``result`` then, or raises what the job has raised."""
        begun: Future[Any] = Future()
        failed: list[BaseException] = []

        def finish(_: Future[Any]) -> Any:
            if failed:
                raise failed[0]
            return result

        ended = begun.then(finish)

        def done(_: Any, error: BaseException | None) -> None:
            if error is not None:
                failed.append(error)
            begun.set_result(None)

        self._enqueue(job, args, options, done)
        return ended

    def _enqueue(self, job: Callable[..., Any], args: Any, options: Any, done: Callable[[Any, Any], None]) -> None:
        def run() -> None:
            result, error = None, None
            try:
                with self._running:
                    result = job(*args, **options)
            except BaseException as raised:
                error = raised
            self._pending -= 1
            done(result, error)

        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._pending += 1
        self._jobs.put(run)

    def _work(self) -> None:
        torch.set_grad_enabled(False)
        while (job := self._jobs.get()) is not None:
            job()
            del job

    def close(self, timeout: float) -> None:
        """End the thread, when it has done what is pending, or ``timeout`` is over."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._jobs.put(None)
            self._thread.join(timeout)
            self._thread = None
