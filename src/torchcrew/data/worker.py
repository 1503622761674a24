"""What a loader's worker does around torch's own worker loop.

    main(ends, target, args)      target is torch's `_worker_loop`, unchanged
      own process group, death signal
      arena owner, block writer; `_new_shared` allocates in the block
      target(..., IndexEnd, ResultEnd, DoneEnd, ...)   the queues and the event that torch asked for

Owner      of the arena: this process, as long as it lives. Of the sockets' ends given to it: this process.
Death      of the user's process: EOF or a broken pipe here, the guardian's SIGKILL where native code blocks.
Waiting    for indices (idle), for room in memory (see `room.py`), for the result socket (until the user reads, hangs up
           or dies).
"""

from __future__ import annotations

import contextlib
import enum
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty
from typing import Any

from torchcrew import torch_private
from torchcrew.channel.packets import IndexReceiver, Sender
from torchcrew.channel.writer import PLACE_MIN, BlockWriter
from torchcrew.crew import stacks
from torchcrew.crew.board import Board, State, WorkerCounters
from torchcrew.data.room import Room
from torchcrew.memory import libc
from torchcrew.memory.arena import Arena, ArenaOwner, Loan

__all__ = ("End", "Worker", "WorkerEnds", "main")

#: Seconds between two looks of an idle worker whether another waits for memory that this one keeps warm.
_IDLE_LOOK = 0.25


class End(enum.Enum):
    """Stands in the arguments of torch's worker loop for what only the worker can make."""

    INDICES = "index queue"
    RESULTS = "result queue"
    DONE = "done event"


@dataclass
class WorkerEnds:
    """All that a worker is given; pickles while a process starts (descriptors travel with it)."""

    number: int
    indices: socket.socket
    results: socket.socket
    arena: Arena
    taken: list[Loan]
    board: Board
    budget: int
    user: int  # pid
    die_with_thread: bool
    #: The user's ends of everything, which a forked worker inherits and must close.
    inherited: list[Any] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "inherited": []}


class Worker:
    """This worker's resources, and its counters on the board."""

    def __init__(self, ends: WorkerEnds) -> None:
        self.ends = ends
        self.current = -1
        self.room = Room(self)
        self.owner = ArenaOwner(ends.arena, ends.taken, self.room.may_take)
        self.writer = BlockWriter(self.owner, self.room.make)
        self.sender = Sender(ends.results, ends.number, self.writer)
        self.receiver = IndexReceiver(ends.indices)
        self.items = 0
        self.nanoseconds = [0] * len(State)
        self._since = time.perf_counter_ns()
        self.state = State.BUSY

    def enter(self, state: State) -> None:
        """Count the time of the state that ends, and publish."""
        self.begin(state)
        self.publish(self.owner.committed)

    def begin(self, state: State) -> None:
        """Count the time of the state that ends, and publish the new state; the counters go with the next `enter`."""
        now = time.perf_counter_ns()
        self.nanoseconds[self.state] += now - self._since
        self._since, self.state = now, state
        self.ends.board.set_state(self.ends.number, state)

    def publish(self, committed: int) -> None:
        """Put the counters on the board, with ``committed`` bytes of shared memory."""
        self.ends.board.write(
            self.ends.number,
            WorkerCounters(
                self.state,
                committed,
                self.items,
                self.writer.bytes_sent,
                self.current,
                *self.nanoseconds,
            ),
        )


class _IndexEnd:
    """The index queue, as torch's worker loop sees it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def get(self, timeout: float) -> Any:
        worker = self._worker
        worker.enter(State.IDLE)
        try:
            item = self._next(timeout)
        except EOFError:
            # The user is gone, or is exiting. Leave quietly, as torch does: there is nobody to tell.
            raise SystemExit(0) from None
        if type(item) is tuple:
            worker.current = item[0]
        worker.begin(State.BUSY)
        return item

    def _next(self, timeout: float) -> Any:
        worker = self._worker
        for _ in range(max(1, int(timeout / _IDLE_LOOK))):
            try:
                return worker.receiver.get(min(timeout, _IDLE_LOOK))
            except Empty:
                if worker.room.wanted_by_others():
                    worker.writer.give_up()
                    worker.enter(State.IDLE)
        raise Empty


class _ResultEnd:
    """The result queue, as torch's worker loop sees it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def put(self, item: Any) -> None:
        worker = self._worker
        worker.items += 1
        try:
            worker.sender.send(item)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the user hung up; the end, or its own death, is on its way
        except Exception:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                worker.sender.send((item[0], self._failure(item[1])))

    def _failure(self, data: Any) -> Any:
        """What to send instead of something that cannot be pickled."""
        wrapper = torch_private.ExceptionWrapper
        if not isinstance(data, wrapper):
            return wrapper(where=f"in DataLoader worker process {self._worker.ends.number}")  # type: ignore[no-untyped-call]
        # An exception of a class that the user's process cannot import: say it with the nearest base that it can.
        data.exc_type = next(kind for kind in data.exc_type.__mro__ if _importable(kind))
        return data

    def cancel_join_thread(self) -> None:
        """There is no thread."""

    def close(self) -> None:
        self._worker.ends.results.close()


def _importable(kind: type) -> bool:
    try:
        pickle.dumps(kind)
    except Exception:
        return False
    return True


class _DoneEnd:
    """The done event, as torch's worker loop sees it."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def is_set(self) -> bool:
        return self._board.done


def main(ends: WorkerEnds, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Run torch's worker loop over our ends of the channels."""
    # Own groups are in the terminal's background: with `stty tostop` a worker that prints would be stopped, for ever.
    for signum in (signal.SIGTTOU, signal.SIGTTIN):
        signal.signal(signum, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    if ends.die_with_thread and os.getppid() == ends.user:
        libc.set_death_signal(signal.SIGKILL)
        if os.getppid() != ends.user:
            os._exit(1)
    for resource in ends.inherited:
        resource.close()
    stacks.offer(f"loader worker {ends.number}", ends.user)
    worker = Worker(ends)
    torch_private.allocate_batches_with(worker.writer.new_shared, PLACE_MIN)
    made = {End.INDICES: _IndexEnd(worker), End.RESULTS: _ResultEnd(worker), End.DONE: _DoneEnd(ends.board)}
    target(*(made[arg] if isinstance(arg, End) else arg for arg in args))
