"""A pool's workers and threads: who starts, who sees a worker die, who ends what.

    worker thread   run_workers: starts workers, waits on their pidfds, reports deaths, starts others
    task thread     run_tasks:   takes tasks from the users' iterables and sends them (`pool_tasks`)
    result thread   run_results: receives results and hands them on; the users' callbacks run here

Owner      the `Crew` owns sockets, workers and threads. The threads know the crew and not the pool, so that a pool
           nobody refers to is collected, and its finalizer calls `terminate`.
Closing    `close`, then as soon as no result is waited for: the worker thread ends, and has the task thread end, which
           shuts the tasks' socket down, and has the result thread end. The workers end when that socket is empty.
           `terminate`: the same at once; SIGTERM, then SIGKILL for workers that do not end.
Death      of a worker in a task: reported, and another is started. Before its initializer has returned: while others
           work, it is tried again, ever later; when none is left, the pool is broken after the third initializer that
           raised or the tenth worker that died.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import pool as _typed
from multiprocessing import util
from typing import Any

from torchcrew.multiprocessing.pool_results import abandon, describe_exit
from torchcrew.multiprocessing.pool_tasks import Death, Ledger
from torchcrew.multiprocessing.pool_worker import FAILED, SLOTS, STARTING, Link, work

__all__ = ("Crew",)

_stock: Any = _typed
RUN, TERMINATE = _stock.RUN, _stock.TERMINATE

#: Starts that may fail in a row while no worker is ready: what raises does so again, what was killed need not be.
_RAISED_MAX, _DIED_MAX = 3, 10
#: Between failed starts while others work, in seconds: doubled each time.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0
#: How long a worker may take to end after SIGTERM, in seconds. Only one with a handler of its own takes any.
_TERM_DEADLINE = 5.0
#: A process that the kernel says is dead has its exit code here within microseconds; a fork server's, milliseconds.
_REAP_DEADLINE = 1.0
#: How long to wait for the task thread before asking whether it is in the user's iterator, in seconds.
_ASK = 0.05


class _Bell:
    """Wakes the worker thread. A finalizer may ring it anywhere, also when it is closed."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def ring(self) -> None:
        fd = self.fd
        if fd >= 0:
            with contextlib.suppress(OSError):  # closed in between, or rung very often
                os.eventfd_write(fd, 1)

    def silence(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close


class _Cache(dict[int, Any]):
    """The results that are waited for, by job; says when there are none any more."""

    def __init__(self, emptied: Callable[[], None]) -> None:
        super().__init__()
        self._emptied = emptied

    def __delitem__(self, job: int) -> None:
        super().__delitem__(job)
        if not self:
            self._emptied()

    def pop(self, job: int, *default: Any) -> Any:
        result = super().pop(job, *default)
        if not self:
            self._emptied()
        return result


class _Member:
    """A running worker."""

    def __init__(self, process: Any, slot: int) -> None:
        self.process, self.slot = process, slot
        # A process that a fork server has reaped already has none; and any child of a worker keeps its sentinel quiet.
        self._pidfd = -1
        with contextlib.suppress(ProcessLookupError, AttributeError):
            self._pidfd = os.pidfd_open(process.pid)

    @property
    def sentinel(self) -> int:
        """A descriptor that is readable when the worker is dead."""
        return self._pidfd if self._pidfd >= 0 else int(self.process.sentinel)

    def is_dead(self) -> bool:
        poller = select.poll()
        poller.register(self.sentinel, select.POLLIN)
        return bool(poller.poll(0))

    def reap(self) -> None:
        """Have the exit code of a dead worker, and its descriptor closed."""
        self.process.join(_REAP_DEADLINE)
        self.close()

    def close(self) -> None:
        fd, self._pidfd = self._pidfd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close


class Crew:
    """What the pool's threads work on; everything but the pool's own face."""

    def __init__(self, context: Any, process: Callable[..., Any], processes: int, options: tuple[Any, ...]) -> None:
        self.context = context
        self.process = process
        self.processes = processes
        self.state = RUN
        self.owner = os.getpid()
        self.pool: list[Any] = []
        self.tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.bell = _Bell()
        # A proxy: in a cycle, the workers' descriptors would stay until the collector comes by.
        crew = weakref.proxy(self)
        self.cache = _Cache(lambda: crew._cache_is_empty())
        self.link = Link()
        self.ledger = Ledger(self.link, self.cache, lambda: crew.processes)
        self.threads: list[threading.Thread] = []
        self.in_iterator = False
        self._options = options
        self._members: list[_Member] = []
        self._starting = threading.RLock()
        self._next_slot = 0
        self._failures = 0
        self._next_start = 0.0

    def _cache_is_empty(self) -> None:
        if self.state is not RUN:
            self.bell.ring()

    # Workers ----------------------------------------------------------------------------------------------------------

    def populate(self) -> None:
        """Start as many workers as are missing."""
        with self._starting:
            while len(self.pool) < self.processes and self.state is not TERMINATE:
                self._start_one()

    def _start_one(self) -> None:
        slot = self._free_slot()
        self.link.board.word(slot).value = STARTING
        process = self.process(self.context, target=work, args=(self.link, slot, *self._options))
        process.name = process.name.replace("Process", "PoolWorker")
        process.daemon = True
        self.ledger.starts(slot)
        try:
            process.start()
        except BaseException:
            self.ledger.did_not_start(slot)
            raise
        self.pool.append(process)
        self._members.append(_Member(process, slot))
        util.debug("added worker")

    def _free_slot(self) -> int:
        for _ in range(SLOTS):
            slot, self._next_slot = self._next_slot, (self._next_slot + 1) % SLOTS
            if self.ledger.is_free(slot):
                return slot
        raise ValueError(f"a pool can have {SLOTS} workers")

    def give_up(self) -> None:
        """End the workers of a pool that could not start all."""
        for process in self.pool:
            if process.exitcode is None:
                process.terminate()
        for process in self.pool:
            process.join()
        self.close()

    def run_workers(self) -> None:
        """The worker thread: replace workers that end, until the pool is closed and no result is waited for."""
        while self.state is RUN or (self.cache and self.state is not TERMINATE):
            self._bury()
            pause = self._replace()
            with self._starting:
                sentinels = [member.sentinel for member in self._members]
            poller = select.poll()
            for fd in (self.bell.fd, *sentinels):
                poller.register(fd, select.POLLIN)
            poller.poll(None if pause is None else pause * 1000)
            self.bell.silence()
        self.tasks.put(None)
        util.debug("worker handler exiting")

    def _bury(self) -> None:
        """Report the workers that have ended."""
        with self._starting:
            dead = [member for member in self._members if member.is_dead()]
            self._members = [member for member in self._members if member not in dead]
        for member in dead:
            member.reap()
            with contextlib.suppress(ValueError):
                self.pool.remove(member.process)
            word = self.link.board.word(member.slot).value
            util.debug("worker %s %s", member.process.pid, describe_exit(member.process.exitcode))
            death = Death(member.process, member.slot, word)
            if word in (STARTING, FAILED):
                death.broken_by = self._start_failed(
                    "its initializer raised an error" if word == FAILED else "it never got to its first task",
                    f"{member.process.name}, pid {member.process.pid}, {describe_exit(member.process.exitcode)}",
                    _RAISED_MAX if word == FAILED else _DIED_MAX,
                )
            else:
                self._failures = 0
            self.ledger.report(death)

    def _start_failed(self, what: str, who: str, limit: int) -> str:
        """Count a worker that could not be started; returns what to say if it is the last."""
        self._failures += 1
        if any(self.link.board.word(member.slot).value not in (STARTING, FAILED) for member in self._members):
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(self._failures, 10))
            self._next_start = time.monotonic() + pause
        elif self._failures >= limit:
            return f"no worker of the pool could be started, in {self._failures} attempts: {what} ({who})"
        return ""

    def _replace(self) -> float | None:
        """Start what is missing; returns seconds to wait before the next attempt, None if there is none to make."""
        if self.ledger.is_broken() or len(self.pool) >= self.processes:
            return None
        pause = self._next_start - time.monotonic()
        if pause > 0:
            return pause
        try:
            self.populate()
        except Exception as error:
            broken_by = self._start_failed("the process could not be started", repr(error), _RAISED_MAX)
            if broken_by:
                self.ledger.report(Death(None, -1, 0, broken_by, error))
            return _FIRST_PAUSE
        return None

    # Tasks and results ------------------------------------------------------------------------------------------------

    def run_tasks(self) -> None:
        """The task thread: take tasks from the users' iterables and send them."""
        for sequence, set_length in iter(self.tasks.get, None):
            if not self._send_all(sequence, set_length):
                break
            sequence = set_length = None
        self.ledger.end()
        self.ledger.finish()
        util.debug("task handler exiting")

    def _send_all(self, sequence: Iterable[Any], set_length: Callable[[int], None] | None) -> bool:
        task = None
        for task in self._iterate(sequence):
            if self.state is TERMINATE:
                return False
            self.ledger.submit(*task)
            if set_length is not None and self.ledger.is_broken():
                break  # an endless iterable would make endless errors
        if set_length is not None:
            with contextlib.suppress(KeyError):  # given up by `terminate`
                set_length(task[1] + 1 if task else 0)
        return True

    def _iterate(self, sequence: Iterable[Any]) -> Iterator[Any]:
        iterator = iter(sequence)
        while True:
            self.in_iterator = True
            try:
                task = next(iterator, None)
            finally:
                self.in_iterator = False
            if task is None:
                return
            yield task

    # Ending -----------------------------------------------------------------------------------------------------------

    def start_threads(self) -> None:
        """Start the pool's threads."""
        for target in (self.run_workers, self.run_tasks, self.run_results):
            thread = threading.Thread(target=target, daemon=True)
            thread._state = RUN  # type: ignore[attr-defined]
            self.threads.append(thread)
            thread.start()

    def run_results(self) -> None:
        """The result thread."""
        self.ledger.collect()
        util.debug("result handler exiting")

    def join(self) -> None:
        """Wait until all is over, after `close` or `terminate`."""
        worker_thread, task_thread, result_thread = self.threads
        worker_thread.join()
        if self.state is not TERMINATE:  # else it may be in the user's iterator, for ever
            task_thread.join()
        result_thread.join()
        for process in self.pool:
            process.join()
        self.close()

    def terminate(self) -> None:
        """End everything now. Called once, by the pool's finalizer, in whatever thread."""
        self.state = TERMINATE
        self.bell.ring()
        self.ledger.stop()
        worker_thread, task_thread, result_thread = self.threads
        _join(worker_thread)  # so that no worker is started behind our back
        self._end_workers()
        self.tasks.put(None)
        while task_thread.is_alive() and not self.in_iterator and task_thread is not threading.current_thread():
            task_thread.join(_ASK)
        self.ledger.finish()
        _join(result_thread)
        for result in list(self.cache.values()):
            abandon(result)
        self.cache.clear()
        self.close()

    def _end_workers(self) -> None:
        running = [process for process in self.pool if process.exitcode is None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + _TERM_DEADLINE
        for process in running:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join(_REAP_DEADLINE)

    def close(self) -> None:
        """Close descriptors; idempotent."""
        self.bell.close()
        self.link.close()
        self.ledger.close()
        for member in self._members:
            member.close()
        self._members = []


def _join(thread: threading.Thread) -> None:
    if thread is not threading.current_thread():
        thread.join()
