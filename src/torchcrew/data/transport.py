"""The multiprocessing context that torch's iterator is given: its queues are our channels.

torch's iterator asks its context for one result queue, one event, and per worker an index queue and a process. It never
looks inside them. So order, prefetching, shutdown and errors stay torch's code, of whatever release is installed.

Owner      `Transport` owns, in the user's process: the receiving end of the result socket, the sending ends of the
           index sockets, an epoll, an arena per worker, the board. The workers' pidfds are the guardian's.
Closing    `close`, after the workers have ended: sockets and descriptors go, arenas return to the pool.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from multiprocessing import util
from typing import Any

from torchcrew.channel.packets import IndexSender, Receiver
from torchcrew.channel.sockets import seqpacket_pair
from torchcrew.crew import guardian
from torchcrew.crew.board import NOTHING, Board
from torchcrew.crew.guardian_main import is_dead
from torchcrew.data.worker import End, WorkerEnds, main
from torchcrew.memory import pool
from torchcrew.memory.arena import Arena, Loan
from torchcrew.memory.lease import open_leases

__all__ = ("Transport",)


#: Seconds that a killed worker may take to be gone.
_KILLED = 1.0


class _Results:
    """The result queue, as torch's iterator sees it."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self.get = receiver.get

    def put(self, item: Any) -> None:
        """torch puts something only to wake its pinning thread at the end."""
        self._receiver.hang_up()

    def cancel_join_thread(self) -> None:
        """There is no thread."""

    def close(self) -> None:
        """`Transport.close` does it."""


class _Indices(IndexSender):
    """An index queue, as torch's iterator sees it."""

    def cancel_join_thread(self) -> None:
        """There is no thread."""


class _Done:
    """The event that ends the workers, as torch's iterator sees it."""

    def __init__(self, board: Board) -> None:
        self.set = board.set_done
        self._board = board

    def is_set(self) -> bool:
        return self._board.done


class Transport:
    """What one iterator and its workers share.

    Args:
        context: the multiprocessing context (or module) that makes the processes.
        workers: how many.
        budget: bytes of shared memory for all of them.
    """

    def __init__(self, context: Any, workers: int, budget: int) -> None:
        self._context = context
        self._budget = budget
        self.pid = os.getpid()
        received, self._sent = seqpacket_pair()
        self._arenas: list[Arena] = []
        self._processes: list[Any] = []
        self._senders: list[_Indices] = []
        # Nothing that the receiver or the exit handler holds may hold the iterator: like stock's, it ends its workers
        # the moment its last reference is gone, not when the cyclic collector comes by.
        self.receiver = Receiver(
            received,
            functools.partial(_lease, self._arenas),
            functools.partial(_died, self._processes, self._senders),
        )
        self.receiver.index_senders = self._senders
        self._results: _Results | None = None
        self._worker_ends: list[WorkerEnds] = []
        self._watched = 0
        self._pidfds: dict[int, int | None] = {}
        self.closed = False
        self.board = Board.create(workers)  # last: it is the only one that must be closed by hand
        self._resources: list[Any] = [self.receiver, self._sent, self.board]
        # At exit the standard library terminates daemons and waits for them: before that, ours can be reached and go.
        # Not bound to `self`: when a garbage cycle is collected, that would close the sockets before the iterator's
        # `__del__` has said goodbye on them, and workers whose ends another crew holds copies of would not notice.
        self._at_exit = util.Finalize(None, _let_go, args=(self._processes, self._resources), exitpriority=10)

    # What torch's iterator calls ------------------------------------------------------------------------------------

    def Queue(self) -> Any:
        """The result queue first, then one index queue per worker."""
        if self._results is None:
            self._results = _Results(self.receiver)
            return self._results
        self.watch_started()
        theirs, ours = seqpacket_pair()
        self._senders.append(_Indices(ours))
        self._resources += (self._senders[-1], theirs)
        self._worker_ends.append(self._ends(len(self._worker_ends), theirs))
        return self._senders[-1]

    def Event(self) -> Any:
        """The event that ends the workers."""
        return _Done(self.board)

    def Process(self, target: Any, args: tuple[Any, ...]) -> Any:
        """A process of the user's context that runs ``target`` over our channels."""
        ends = {_Results: End.RESULTS, _Indices: End.INDICES, _Done: End.DONE}
        theirs = tuple(ends.get(type(arg), arg) for arg in args)
        process = self._context.Process(target=main, args=(self._worker_ends[-1], target, theirs))
        self._processes.append(process)
        return process

    # ----------------------------------------------------------------------------------------------------------------

    def _ends(self, number: int, indices: Any) -> WorkerEnds:
        arena = pool.take()
        inherited = [self.receiver, *self._senders, *self._arenas]
        self._arenas.append(arena)
        return WorkerEnds(
            number=number,
            indices=indices,
            results=self._sent,
            arena=arena,
            taken=open_leases(arena),
            board=self.board,
            budget=self._budget,
            # The kernel sends the death signal when the *thread* that forked ends: only the main thread lives as long
            # as the process. Everywhere else the guardian is alone responsible.
            user=os.getpid(),
            die_with_thread=threading.current_thread() is threading.main_thread(),
            inherited=inherited,
        )

    def watch_started(self) -> None:
        """Guard and watch the workers that have started since; close our copies of their ends."""
        for number in range(self._watched, len(self._processes)):
            process = self._processes[number]
            if process.pid is None:
                break
            self._watched += 1
            # By number: a watch that an exception interrupts must not shift those that follow.
            pidfd = self._pidfds[number] = guardian.watch(process.pid)
            if pidfd is not None:  # else it is gone, and whoever reaped it knows
                self.receiver.watch(number, pidfd)
            self._worker_ends[number].indices.close()

    def hang_up(self) -> None:
        """Before the workers are asked to end: wake those that wait for us."""
        self.board.want(NOTHING)
        self.receiver.hang_up()
        _continue(self._processes[: self._watched])

    def abandon(self) -> None:
        """In a forked child: let go of what it inherited, which is its parent's to close."""
        self._at_exit.cancel()

    def close(self) -> None:
        """After the workers were asked to end: kill what did not, give everything back. Idempotent."""
        if self.closed:
            return
        self.closed = True
        arenas = list(self._arenas)
        # Each step is taken also when one before it raises, as torch's SIGCHLD handler may at any moment. Last in,
        # first out: the guardian's pidfds may go when the receiver no longer waits on them.
        with contextlib.ExitStack() as steps:
            steps.callback(pool.put_back, arenas)
            for process in self._processes[: self._watched]:
                steps.callback(guardian.forget, process.pid)
            steps.callback(self._at_exit)
            for number, process in enumerate(self._processes):
                if process.pid is not None:  # else its start failed, or was interrupted
                    steps.callback(self._kill, number, arenas)

    def _kill(self, number: int, arenas: list[Arena]) -> None:
        process = self._processes[number]
        if not self._is_gone(number):
            process.kill()
        process.join(_KILLED)  # reaps
        # The exit code is read, so that nobody takes its end for one that was never looked at.
        if process.exitcode is None and not self._is_gone(number):
            # The kernel cannot end it now: it is not waited for, and keeps its arena.
            arenas[:] = [arena for arena in arenas if arena is not self._arenas[number]]

    def _is_gone(self, number: int) -> bool:
        # While another thread reaps it (every start of a process looks at all), `is_alive` takes a dead one for alive.
        if number in self._pidfds:
            pidfd = self._pidfds[number]
            return pidfd is None or is_dead(pidfd)
        return not self._processes[number].is_alive()


def _lease(arenas: list[Arena], number: int, loan: Loan) -> Any:
    return arenas[number].lease(loan)


def _died(processes: list[Any], senders: list[_Indices], number: int) -> bool:
    """Whether worker ``number``, which is gone, was not asked to go."""
    # The exit status may come a moment later: of a zygote's child, or while another thread reaps it.
    deadline = time.monotonic() + _KILLED
    while processes[number].is_alive() and time.monotonic() < deadline:
        time.sleep(0.001)
    return not senders[number].ended


def _let_go(processes: list[Any], resources: list[Any]) -> None:
    """Close our ends of everything; workers that are still there see that, and can."""
    _continue(processes)
    for resource in resources:
        resource.close()


def _continue(processes: list[Any]) -> None:
    """Let stopped workers do what they will be asked next; it does nothing to those that run."""
    for process in processes:
        if process.pid is not None and process.is_alive():
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGCONT)
