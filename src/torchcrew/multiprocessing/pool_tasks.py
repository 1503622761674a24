"""A pool's tasks on their way: which are out, which were lost with a worker, which come back.

    task thread     submit ──► number, note, send ──────────────► workers
    result thread   collect ◄─ result: strike out, hand on ◄──────┘
                            ◄─ mark: a worker died ◄───────────── worker thread   report

The pool numbers its tasks in the order in which it sends them, and keeps each until its result is here. When a worker
has died, the worker thread sends a mark through the results' own socket. Sockets keep the order, so when the mark
arrives, all that the dead worker ever sent was received before. Then there are three cases, and no fourth:

announced   Its word on the board names a task that is out: it died in it. That task fails, with `WorkerDied`.
taking      It died with the flag "taking" in its word: it may have received a task and not have announced it. The
            packets that wait begin with number F; all that is below F was received by somebody. As soon as every other
            worker was seen not taking, or its word has changed, all that these received is announced. A second mark
            makes sure that what they have finished is here. What is out then, below F, and announced by nobody, was
            lost before it had begun: it is sent again. (A dead worker that was not yet reported counts as another one.)
else        It had nothing.

So a task runs once, or fails; a kill at any instruction loses no other. Nothing here waits for a lock that another
process could hold: there is none.

Death      of workers: above. Of this process: the workers end by themselves.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchcrew.channel.envelope import (
    FULL_ERRORS,
    HEAD,
    Envelope,
    load_packet,
    open_packet,
    peek_number,
    receive_packet,
)
from torchcrew.channel.sharing import SharingEncoder
from torchcrew.errors import PoolBroken
from torchcrew.multiprocessing.pool_results import deliver, reraise, users_function, worker_died
from torchcrew.multiprocessing.pool_worker import TAKING, Link

__all__ = ("Death", "Ledger")

#: Tasks that may be out at once: enough for the task thread to rest while workers go on, few for an endless iterable.
_OUT_MAX = 128
#: Bytes of pickles that may be out, beyond one task for each worker and one that waits.
_OUT_BYTES_MAX = 8 << 20
#: How long to sleep before looking again, in seconds, at what announces itself by no event.
_NAP = 1e-3
#: In a mark's payload. An initializer's error is longer.
_DIED, _SEARCHED = b"D", b"S"


@dataclass
class Death:
    """A worker that has ended."""

    process: Any
    slot: int
    word: int
    broken_by: str = ""
    """If the pool gives up with this death: what it says then."""
    cause: BaseException | None = None


class _Task:
    """One task that is out."""

    __slots__ = ("envelope", "func", "index", "job", "nbytes")

    def __init__(self, job: int, index: int, func: Any, message: tuple[bytes, list[int], Any]) -> None:
        payload, fds, owners = message
        self.job, self.index, self.func = job, index, func
        self.nbytes = len(payload)
        # Kept until the result is here. Only a task that nobody announced is sent again, so that nobody has opened it.
        self.envelope = Envelope(payload, fds, owners if fds else None)


@dataclass
class _Search:
    """Looks for tasks that a dead worker received and did not announce."""

    first: int
    """Packets below this one were received by somebody."""
    taking: dict[int, int]
    """Words, by slot, of workers that may be about to announce one of these."""
    announced: set[int] = field(default_factory=set)
    marked: bool = False


class Ledger:
    """See the module. One thread submits, one collects, one reports; the other methods are for all.

    Args:
        link: to the workers.
        cache: the results that are waited for, by job.
        processes: says how many workers there are.
    """

    def __init__(self, link: Link, cache: dict[int, Any], processes: Callable[[], int]) -> None:
        self.cache = cache
        #: What `PoolBroken` says, and its cause.
        self._broken: tuple[str, BaseException | None] | None = None
        #: No task is sent any more.
        self.stopped = False
        self._link = link
        self._processes = processes
        self._encoder = SharingEncoder()
        self._finished = False
        self._out: dict[int, _Task] = {}
        self._last = 0
        # Reentrant, as the collector may run a finalizer anywhere.
        self._sending = threading.RLock()
        self._room = threading.Condition(threading.RLock())
        self._wants_room = False
        # Two counters, each written by one thread.
        self._bytes_sent = self._bytes_done = 0
        self._failed: deque[tuple[int, int, BaseException]] = deque()
        self._deaths: deque[Death] = deque()
        self._unresolved: set[int] = set()
        self._searches: deque[_Search] = deque()
        self._again: deque[_Task] = deque()
        self._initializer_error: BaseException | None = None

    # The task thread --------------------------------------------------------------------------------------------------

    def submit(self, job: int, index: int, func: Any, args: Any, kwds: Any) -> None:
        """Send a task to the workers; waits for room. What fails, fails as the task's result."""
        if func is reraise:
            self.fail(job, index, args[0])
            return
        try:
            task = _Task(job, index, users_function(func, args), self._encoder.encode((func, args, kwds)))
        except Exception as error:
            self.fail(job, index, error)
            return
        if not self._has_room(1, task.nbytes):
            self._wait_for_room(task.nbytes)
        self._bytes_sent += task.nbytes
        try:
            while not self.stopped and not self._send(task):
                poller = select.poll()
                poller.register(self._link.task_writer, select.POLLOUT)
                poller.poll(_NAP * 1000)
        except (PoolBroken, OSError) as error:
            self._bytes_sent -= task.nbytes
            self.fail(job, index, error)

    def fail(self, job: int, index: int, error: BaseException) -> None:
        """Have the result thread hand on an error: it alone does that, as results count without a lock."""
        self._failed.append((job, index, error))
        with contextlib.suppress(OSError):
            self._mark(b"")  # where there is no room for it, that thread is awake

    def _has_room(self, share: int, nbytes: int = 0) -> bool:
        """Whether one more may be out, of at most 1/share of the tasks that could."""
        out, processes = len(self._out), self._processes()
        if out * share >= max(_OUT_MAX, 4 * processes):
            return False
        return out <= processes or self._bytes_sent - self._bytes_done + nbytes <= _OUT_BYTES_MAX

    def _wait_for_room(self, nbytes: int) -> None:
        with self._room:
            self._wants_room = True
            while not (self._has_room(2, nbytes) or self.stopped):
                self._room.wait(1.0)
            self._wants_room = False

    def _send(self, task: _Task) -> bool:
        """Send a task if there is room for it."""
        with self._sending:
            if self._broken is not None:
                raise self._broken_error()
            number = self._last + 1
            self._out[number] = task  # before it is sent: its result may be here at once
            try:
                task.envelope.send(self._link.task_writer, number)
            except OSError as error:
                del self._out[number]
                if error.errno in FULL_ERRORS:
                    return False
                raise
            self._last = number
            return True

    # The result thread ------------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Receive results and hand them on, until `finish`."""
        reader = self._link.result_reader
        poller = select.poll()
        poller.register(reader, select.POLLIN)
        while not self._finished:
            received = receive_packet(reader, linger=False)
            if received is not None:
                self._receive(received)
            if self._failed:
                self._hand_on_failures()
            pending = bool(self._searches or self._again)
            if pending:
                self._search()
                self._send_again()
            if received is None:
                poller.poll(_NAP * 1000 if pending else None)

    def _hand_on_failures(self) -> None:
        while self._failed:
            job, index, error = self._failed.popleft()
            deliver(self.cache, job, index, (False, error))

    def _receive(self, received: Any) -> None:
        number = HEAD.unpack_from(received[0])[0]
        mark: bytes | None = None
        obj: Any
        try:
            if not number and received[1][0] <= HEAD.size + 1:
                mark, obj = bytes(open_packet(received).payload), None
            else:
                obj = load_packet(received)
        except Exception as error:  # an error's class that cannot be made again from its arguments, for instance
            obj = (False, error)
        if number:
            task = self._out.pop(number, None)
            if task is not None:
                self._close_account(task, obj)
        elif mark is None:
            self._initializer_error = obj[1] if isinstance(obj, tuple) else obj
        elif mark == _DIED:
            self._bury(self._deaths.popleft())
        elif mark == _SEARCHED:
            self._send_lost(self._searches.popleft())

    def _close_account(self, task: _Task, obj: tuple[bool, Any]) -> None:
        """Hand on the result of a task that is no longer out."""
        self._bytes_done += task.nbytes
        if self._wants_room and self._has_room(2):
            with self._room:
                self._room.notify()
        deliver(self.cache, task.job, task.index, obj)

    def _bury(self, death: Death) -> None:
        """All that a dead worker has sent is here: see which task it had."""
        self._unresolved.discard(death.slot)
        task = self._out.pop(death.word >> 1, None)
        if death.word & TAKING:
            self._begin_search()
        if task is not None:
            self._close_account(task, (False, worker_died(death.process, task.func, task.index)))
        if death.broken_by:
            self._break(death)
        else:
            self._wake_one()

    def _wake_one(self) -> None:
        """A worker that was woken for a task and died before it took it has kept the others asleep."""
        with self._sending, contextlib.suppress(OSError):
            Envelope(b"").send(self._link.task_writer, self._last + 1)
            self._last += 1

    def _break(self, death: Death) -> None:
        with self._sending:
            self._broken = death.broken_by, self._initializer_error or death.cause
            tasks = [*self._out.values(), *self._again]
            self._out.clear()
            self._again.clear()
        for task in tasks:
            self._close_account(task, (False, self._broken_error()))

    def _broken_error(self) -> PoolBroken:
        """An error of its own for each task: raising one adds to its traceback."""
        assert self._broken is not None
        error = PoolBroken(self._broken[0])
        error.__cause__ = self._broken[1]
        return error

    # Lost tasks -------------------------------------------------------------------------------------------------------

    def _begin_search(self) -> None:
        first = self._first()
        words = self._words()
        self._searches.append(_Search(first, {slot: word for slot, word in words.items() if word & TAKING}))

    def _first(self) -> int:
        """The number of the first packet that waits, the next one's if none does."""
        with self._sending:
            return peek_number(self._link.task_reader) or self._last + 1

    def _words(self) -> dict[int, int]:
        # The lock keeps the processor from reading words after what follows.
        with self._sending:
            return {slot: self._link.board.word(slot).value for slot in list(self._unresolved)}

    def _search(self) -> None:
        """See which workers have announced what they took; when all have, have what they finished brought here."""
        for search in self._searches:
            if search.marked:
                continue
            words = self._words()
            search.taking = {slot: word for slot, word in search.taking.items() if words.get(slot) == word}
            if search.taking:
                return  # the marks come in the order of the searches
            search.announced = {word >> 1 for word in words.values()}
            search.marked = self._mark(_SEARCHED)
            if not search.marked:
                return

    def _send_lost(self, search: _Search) -> None:
        for number in sorted(self._out):
            if number < search.first and number not in search.announced:
                self._again.append(self._out.pop(number))
        self._send_again()

    def _send_again(self) -> None:
        while self._again:
            try:
                if not self._send(self._again[0]):
                    return
                self._again.popleft()
            except (PoolBroken, OSError) as error:
                self._close_account(self._again.popleft(), (False, error))

    # The worker thread, and whoever closes the pool -------------------------------------------------------------------

    def starts(self, slot: int) -> None:
        """A worker is about to start that has this slot: from its first moment on it may take tasks."""
        self._unresolved.add(slot)

    def did_not_start(self, slot: int) -> None:
        """It did not."""
        self._unresolved.discard(slot)

    def is_free(self, slot: int) -> bool:
        """Whether no worker has this slot, nor had it and is not yet seen to."""
        return slot not in self._unresolved

    def report(self, death: Death) -> None:
        """A worker has ended; its process was reaped."""
        self._deaths.append(death)
        while not (self.stopped or self._mark(_DIED)):
            time.sleep(_NAP)

    def _mark(self, kind: bytes) -> bool:
        try:
            Envelope(kind).send(self._link.result_writer)
        except OSError as error:
            if error.errno in FULL_ERRORS:
                return False
            raise
        return True

    def is_broken(self) -> bool:
        """Whether every task fails from now on."""
        return self._broken is not None

    def stop(self) -> None:
        """Send no more tasks."""
        self.stopped = True
        with self._room:
            self._room.notify_all()

    def end(self) -> None:
        """Tell the workers that there will be no more tasks."""
        with contextlib.suppress(OSError):
            self._link.task_writer.shutdown(socket.SHUT_WR)

    def finish(self) -> None:
        """Have `collect` return."""
        self._finished = True
        with contextlib.suppress(OSError):  # closed already
            self._mark(b"")  # where there is no room for it, `collect` is not asleep

    def close(self) -> None:
        """Let go of all tasks, when no other thread is at work here any more."""
        self._out.clear()
        self._again.clear()
