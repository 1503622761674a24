"""Room for the next batch: what a worker may take of the budget that all workers of a loader share.

    budget ≥ batches being made + on their way + held by the user + free pages kept warm

Nobody hands out memory. Each worker publishes on the board what it has committed; who needs more claims it there first
and looks at the sum then, so two that do this at once cannot both take the last of it. Who works ahead of the batch
that the user needs next leaves room for that one.

Waiting    without room a worker looks every `_LOOK` seconds whether a batch came back, and gives up its own warm pages;
           so do idle workers when one is blocked. It waits as long as the user is busy, or waits for another worker's
           batch. When the user has waited for this very worker for `_STARVED` seconds and nothing came back, nothing
           will: `ArenaFull`.
Death      of the user's process, or its hanging up, ends the wait.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torchcrew.crew.board import ANYTHING, State
from torchcrew.errors import ArenaFull
from torchcrew.memory.arena import SLOTS
from torchcrew.memory.limits import BUDGET_VARIABLE
from torchcrew.memory.mapping import round_block

if TYPE_CHECKING:
    from torchcrew.data.worker import Worker

__all__ = ("Room",)

#: Seconds the user must have waited for this very worker before it reports that memory is full: other threads of the
#: user may still drop batches.
_STARVED = 1.0
#: Seconds between two looks at the lease table while there is no room.
_LOOK = 0.005


class Room:
    """The budget, as one worker sees it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._board = worker.ends.board
        self._budget = worker.ends.budget
        self._largest = 0

    def may_take(self, nbytes: int) -> bool:
        """Whether this worker's arena may take ``nbytes`` in all; if so, they are claimed on the board."""
        worker, board = self._worker, self._board
        if worker.current < 0:  # what an earlier worker left in the arena
            return board.committed() - board.read(worker.ends.number).committed + nbytes <= self._budget
        self._largest = max(self._largest, nbytes - worker.owner.committed)
        ahead = board.expected not in (ANYTHING, worker.current)
        worker.publish(nbytes)
        if board.committed() + (self._largest if ahead else 0) <= self._budget:
            return True
        worker.publish(worker.owner.committed)
        return False

    def make(self, nbytes: int) -> None:
        """Wait until there may be room for ``nbytes``.

        Raises:
            ArenaFull: there never will be: see the head of this module.
        """
        nbytes = round_block(nbytes)  # what the arena would take
        if nbytes > self._budget:
            raise ArenaFull(self._full(nbytes, "This batch alone is larger than that."))
        if nbytes > self._worker.ends.arena.size - SLOTS:
            raise ArenaFull(self._full(nbytes, "No file of this process may be that large (`ulimit -f`)."))
        state = self._worker.state
        self._worker.enter(State.BLOCKED)
        try:
            self._wait(nbytes)
        finally:
            self._worker.enter(state)

    def _wait(self, nbytes: int) -> None:
        owner = self._worker.owner
        before = owner.used
        starved_since: float | None = None
        while not self._worker.sender.hung_up(_LOOK):
            owner.recycle()
            if owner.used < before or (self.may_take(owner.committed + nbytes) and owner.fits(nbytes)):
                return
            if owner.warm:  # too small for this batch, but maybe not for another worker's
                self.give_up()
            if not self._starving():
                starved_since = None
            elif starved_since is None:
                starved_since = time.monotonic()
            elif time.monotonic() - starved_since > _STARVED:
                raise ArenaFull(self._full(nbytes, "The batches that you still hold take the rest."))
        raise ArenaFull("the loader is closing")

    def give_up(self) -> None:
        """Give free pages back to the system: they count for the budget, and another worker waits for room."""
        self._worker.owner.recycle()
        self._worker.owner.shrink(0)
        self._worker.enter(self._worker.state)

    def wanted_by_others(self) -> bool:
        """Whether another worker waits for room."""
        mine = self._worker.ends.number
        return any(self._board.read(k).state is State.BLOCKED for k in range(self._board.workers) if k != mine)

    def _starving(self) -> bool:
        """Whether the user waits for something that cannot come before somebody gives memory back."""
        wanted = self._board.wanted
        if wanted == ANYTHING:
            return all(self._board.read(k).state is not State.BUSY for k in range(self._board.workers))
        return wanted == self._worker.current

    def _full(self, nbytes: int, why: str) -> str:
        return (
            f"a batch needs {nbytes / 1e6:.1f} MB of shared memory, and the memory budget of this DataLoader is "
            f"{self._budget / 1e6:.1f} MB for all {self._board.workers} workers. {why} Hold fewer batches, or "
            f"raise the budget with DataLoader(memory_budget=...) or the environment variable {BUDGET_VARIABLE}."
        )
