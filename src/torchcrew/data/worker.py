"""What a loader's worker does around torch's own worker loop.

    main(ends, target, args)      target is torch's `_worker_loop`, unchanged
      own process group, death signal
      arena owner, block writer; `_new_shared` allocates in the block
      target(..., IndexEnd, ResultEnd, DoneEnd, ...)   the queues and the event that torch asked for

Owner      of the arena: this process, as long as it lives. Of the sockets' ends given to it: this process.
Death      of the user's process: EOF or a broken pipe here, the guardian's SIGKILL where native code blocks.
Waiting    for indices (idle), for room in memory (blocked: bounded by `_STARVED`, or until the user hangs up), for the
           result socket (blocked: until the user reads, hangs up or dies).
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
from torchcrew.crew.board import ANYTHING, Board, State, WorkerCounters
from torchcrew.errors import ArenaFull
from torchcrew.memory import libc
from torchcrew.memory.arena import SLOTS, Arena, ArenaOwner, Loan
from torchcrew.memory.limits import BUDGET_VARIABLE

__all__ = ("End", "WorkerEnds", "main")

#: Seconds the user must have waited for this very worker before it reports that memory is full: other threads of the
#: user may still drop batches.
_STARVED = 1.0
#: Seconds between two looks at the lease table while there is no room.
_LOOK = 0.005
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


class _Worker:
    """This worker's resources, and its counters on the board."""

    def __init__(self, ends: WorkerEnds) -> None:
        self.ends = ends
        self.current = -1
        self.owner = ArenaOwner(ends.arena, ends.taken, self._may_take)
        self.writer = BlockWriter(self.owner, self._make_room)
        self.sender = Sender(ends.results, ends.number, self.writer)
        self.receiver = IndexReceiver(ends.indices)
        self.largest = 0
        self.items = 0
        self.nanoseconds = [0] * len(State)
        self._since = time.perf_counter_ns()
        self._state = State.BUSY

    def enter(self, state: State) -> None:
        """Count the time of the state that ends, and publish."""
        self.begin(state)
        self._publish(self.owner.committed)

    def begin(self, state: State) -> None:
        """Count the time of the state that ends, and publish the new state; the counters go with the next `enter`."""
        now = time.perf_counter_ns()
        self.nanoseconds[self._state] += now - self._since
        self._since, self._state = now, state
        self.ends.board.set_state(self.ends.number, state)

    def _publish(self, committed: int) -> None:
        self.ends.board.write(
            self.ends.number,
            WorkerCounters(
                self._state,
                committed,
                self.items,
                self.writer.bytes_sent,
                self.current,
                *self.nanoseconds,
            ),
        )

    def _may_take(self, nbytes: int) -> bool:
        board = self.ends.board
        if self.current < 0:  # what an earlier worker left in the arena
            return board.committed() - board.read(self.ends.number).committed + nbytes <= self.ends.budget
        self.largest = max(self.largest, nbytes - self.owner.committed)
        # Who works ahead leaves room for the batch that the user needs next: what is ahead of it lies undelivered.
        ahead = board.expected not in (ANYTHING, self.current)
        # Claimed first and looked at then: of two workers that do this at once, none takes what the other has taken.
        self._publish(nbytes)
        if board.committed() + (self.largest if ahead else 0) <= self.ends.budget:
            return True
        self._publish(self.owner.committed)
        return False

    def _make_room(self, nbytes: int) -> None:
        """Wait until a batch comes back, as long as that can happen."""
        if nbytes > self.ends.budget:
            raise ArenaFull(self._full(nbytes, "This batch alone is larger than that."))
        if nbytes > self.ends.arena.size - SLOTS:
            raise ArenaFull(self._full(nbytes, "No file of this process may be that large (`ulimit -f`)."))
        before = self.owner.used
        state = self._state
        self.enter(State.BLOCKED)
        starved_since: float | None = None
        try:
            while not self.sender.hung_up(_LOOK):
                self.owner.recycle()
                free = self._may_take(self.owner.committed + nbytes) and self.owner.fits(nbytes)
                if self.owner.used < before or free:
                    return
                if self.owner.warm:  # too small for this batch, but maybe not for another worker's
                    self.give_up()
                if not self._starving():
                    starved_since = None
                elif starved_since is None:
                    starved_since = time.monotonic()
                elif time.monotonic() - starved_since > _STARVED:
                    raise ArenaFull(self._full(nbytes, "The batches that you still hold take the rest."))
            raise ArenaFull("the loader is closing")
        finally:
            self.enter(state)

    def give_up(self) -> None:
        """Give free pages back to the system: they count for the budget, and another worker waits for room."""
        self.owner.recycle()
        self.owner.shrink(0)
        self.enter(self._state)

    def wanted_by_others(self) -> bool:
        """Whether another worker waits for room."""
        board = self.ends.board
        return any(board.read(k).state is State.BLOCKED for k in range(board.workers) if k != self.ends.number)

    def _starving(self) -> bool:
        """Whether the user waits for something that cannot come before somebody gives memory back."""
        board = self.ends.board
        wanted = board.wanted
        if wanted == ANYTHING:
            return all(board.read(k).state is not State.BUSY for k in range(board.workers))
        return wanted == self.current

    def _full(self, nbytes: int, why: str) -> str:
        return (
            f"a batch needs {nbytes / 1e6:.1f} MB of shared memory, and the memory budget of this DataLoader is "
            f"{self.ends.budget / 1e6:.1f} MB for all {self.ends.board.workers} workers. {why} Hold fewer batches, or "
            f"raise the budget with DataLoader(memory_budget=...) or the environment variable {BUDGET_VARIABLE}."
        )


class _IndexEnd:
    """The index queue, as torch's worker loop sees it."""

    def __init__(self, worker: _Worker) -> None:
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
        for _ in range(int(timeout / _IDLE_LOOK)):
            try:
                return self._worker.receiver.get(_IDLE_LOOK)
            except Empty:
                if self._worker.wanted_by_others():
                    self._worker.give_up()
        raise Empty


class _ResultEnd:
    """The result queue, as torch's worker loop sees it."""

    def __init__(self, worker: _Worker) -> None:
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
    worker = _Worker(ends)
    torch_private.allocate_batches_with(worker.writer.new_shared, PLACE_MIN)
    made = {End.INDICES: _IndexEnd(worker), End.RESULTS: _ResultEnd(worker), End.DONE: _DoneEnd(ends.board)}
    target(*(made[arg] if isinstance(arg, End) else arg for arg in args))
