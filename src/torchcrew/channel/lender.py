"""The producer's side of snapshots: objects become parcels, whose blocks come back or are taken back.

    encode(obj) ─► Kit ─► Parcel, its data in this process's arena of the channel, which is made for the first block
    sent(parcel, bound)      the blocks are on their way: the message's number is at most ``bound``
    cancel(parcel)           they are free again

Taking back   a block is free again when a consumer returned it, when the participant that claimed it is gone, or when
              nobody claimed it although its message has left the socket and no living participant is receiving: then
              it was received by a process that died before it could claim it. (The last is believed when it was so
              twice, a moment apart: on some processors another core sees two stores in the other order.)
Budget        for all producers of the channel together. A producer may always take its share, so that one that is idle
              and keeps memory cannot starve the others.
Waiting       without room `encode` looks every few milliseconds whether a block came back. Consumers may hold blocks
              for as long as they like. When nothing is on its way, and all who hold blocks wait for the next message,
              nothing will come back: after `STARVED` seconds `ArenaFull`.
Exit          free pages are given back: what others still look at keeps the whole arena, as far as it has pages.
Death         of this process: the arena lives on in the consumers that look at it; nobody lends from it any more.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import util
from queue import Full
from typing import Any, cast

from torchcrew.channel.claims import ClaimedArena, Claims
from torchcrew.channel.holders import other_threads
from torchcrew.channel.parcel import Kit, Parcel
from torchcrew.errors import ArenaFull
from torchcrew.memory.arena import SLOTS, ArenaOwner, Block, Loan
from torchcrew.memory.lease import FREE, ON_LOAN
from torchcrew.memory.limits import BUDGET_VARIABLE
from torchcrew.memory.mapping import round_block

__all__ = ("STARVED", "Lender")

#: Seconds for which nothing came back while nothing could, before `ArenaFull`: another thread of a consumer may still
#: let go of something.
STARVED = 5.0
#: Seconds between two looks at who is gone, while there is room.
_RECLAIM_EVERY = 0.05
#: More than the number of any message.
_NOT_SENT = 1 << 64
#: Messages of the same size mostly take again the block of an earlier one, without recycling all that came back: so
#: many blocks of so many sizes are remembered, so many are looked at, and each time in so many all are recycled.
_LATELY, _SIZES, _LOOK_AT, _RECYCLE_EVERY = 64, 64, 3, 16
#: The naps of a producer that waits for room, in seconds: they grow from the first to the last.
_FIRST_NAP, _LONGEST_NAP = 50e-6, 5e-3


def _may_take(lender: weakref.ref[Lender], nbytes: int) -> bool:
    return cast(Lender, lender()).may_take(nbytes)


class Lender:
    """One process's blocks of one channel. Every method may be called by any thread.

    Args:
        claims: the channel's.
        budget: bytes for all producers.
        first: the number of the first message that has not been received.
        check: called while waiting, with whether that is without a deadline; raises when there is no point in it.
    """

    def __init__(self, claims: Claims, budget: int, first: Callable[[], int], check: Callable[[bool], None]) -> None:
        self._claims = claims
        self.budget = budget
        self._first = first
        self._check = check
        self._owner: ArenaOwner | None = None
        self._arena: ClaimedArena | None = None
        self._key = 0
        self._lock = threading.RLock()
        self._kits: list[Kit] = []
        self._published = 0
        #: Blocks that were lent lately, by their size, the first ones first; and how often one was asked for.
        self._lately: dict[int, collections.deque[Block]] = {}
        self._again = 0
        self._reclaimed = 0.0
        self._suspects: set[Block] = set()
        #: Since when nothing came back while nothing could, and when that was last seen.
        self._starved = (0.0, 0.0)
        #: The arena and its owner, for the finalizer. Not `__del__`, which in a garbage cycle comes after the mappings
        #: have gone: what a finalizer holds is no garbage.
        self._held: list[Any] = []
        self._finalizer = weakref.finalize(self, _let_go, self._held, claims)
        self._finalizer.atexit = False
        _all.add(self)

    # Messages ---------------------------------------------------------------------------------------------------------

    def encode(self, obj: Any, deadline: float | None = None) -> Parcel:
        """Turn ``obj`` into a parcel that must be `sent` or `cancel`led; waits for room.

        Args:
            deadline: of `time.monotonic`; None: as long as it takes.

        Raises:
            Full: there was no room in time.
            ArenaFull: there never will be.
            Exception: whatever pickling raises.
        """
        try:
            kit = self._kits.pop()
        except IndexError:
            kit = Kit(self)
        kit.deadline = deadline
        try:
            encoded, passed = kit.encode(obj)
            parcel = Parcel(encoded, passed, kit.lent, self._arena, self._key)
        except BaseException:
            self._take_back(kit.lent)
            raise  # and the kit is not used again
        if parcel.blocks:
            kit.lent = []
        self._kits.append(kit)
        return parcel

    def sent(self, parcel: Parcel, bound: int) -> None:
        """The parcel was put in; its number is at most ``bound``."""
        for ticket in parcel.tickets:
            ticket[0] = bound

    def cancel(self, parcel: Parcel) -> None:
        """The parcel was not sent."""
        self._take_back(parcel.blocks)

    def _take_back(self, blocks: Sequence[Block]) -> None:
        arena = self._arena
        if arena is not None:
            for block in blocks:
                arena.table[block.slot] = FREE

    # What a writer uses of an owner -----------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Block | None:
        """See `ArenaOwner`."""
        with self._lock:
            owner = self._owner or self._create()
            again = self._take_again(owner, nbytes)
            if again is not None:
                return again
            if time.monotonic() - self._reclaimed > _RECLAIM_EVERY:
                self._reclaim()
            block = owner.allocate(nbytes)
            self._publish()
            return block

    def _take_again(self, owner: ArenaOwner, nbytes: int) -> Block | None:
        """A block of just this size that has come back, in the shortest way."""
        size = round_block(nbytes)
        lately = self._lately.get(size)
        self._again += 1
        if not lately or self._again % _RECYCLE_EVERY == 0:
            return None
        for _ in range(min(len(lately), _LOOK_AT)):
            block = lately.popleft()
            taken = owner.take_again(block)
            if taken:
                self._suspects.discard(block)
                return block
            if taken is False:
                lately.append(block)
        return None

    def lend(self, block: Block, used: int) -> Loan:
        """See `ArenaOwner`."""
        with self._lock:
            cast(ClaimedArena, self._arena).claims[block.slot] = 0
            block.sent = [_NOT_SENT]
            if block.view is None:  # it was taken again
                loan = block.slot, block.offset, block.nbytes
            else:
                loan = cast(ArenaOwner, self._owner).lend(block, used)
            lately = self._lately.get(block.nbytes)
            if lately is None:
                if len(self._lately) >= _SIZES:
                    self._lately.clear()
                lately = self._lately[block.nbytes] = collections.deque(maxlen=_LATELY)
            lately.append(block)
            return loan

    def discard(self, block: Block) -> None:
        """See `ArenaOwner`."""
        with self._lock:
            if block.view is None:  # it was taken again
                cast(ClaimedArena, self._arena).table[block.slot] = FREE
            else:
                cast(ArenaOwner, self._owner).discard(block)

    def recycle(self) -> None:
        """See `ArenaOwner`."""
        with self._lock:
            if self._owner is not None:
                self._owner.recycle()

    def shrink(self, keep: int) -> None:
        """See `ArenaOwner`."""
        with self._lock:
            if self._owner is not None:
                self._owner.shrink(keep)
                self._publish()

    # ------------------------------------------------------------------------------------------------------------------

    def _create(self) -> ArenaOwner:
        self._claims.register()
        _tidy_at_exit()
        self._arena = ClaimedArena.create()
        self._key = int.from_bytes(os.urandom(8), "little") | 1
        self._owner = ArenaOwner(self._arena, (), functools.partial(_may_take, weakref.ref(self)))
        self._held += (self._arena, self._owner)
        return self._owner

    def may_take(self, nbytes: int) -> bool:
        """Whether the arena may take ``nbytes`` in all; if so, they are committed."""
        before = self._published
        self._commit(nbytes)  # before the look, so that of two who do this at once not both take the last of it
        total, producers = self._claims.committed()
        if total <= self.budget or nbytes <= self.budget // max(1, producers):
            return True
        self._commit(before)
        return False

    def _publish(self) -> None:
        committed = cast(ArenaOwner, self._owner).committed
        if committed != self._published:
            self._commit(committed)

    def _commit(self, nbytes: int) -> None:
        self._published = nbytes
        self._claims.commit(nbytes)

    def _reclaim(self) -> None:
        """Free the blocks that nobody has and nobody will receive; see the module."""
        self._reclaimed = time.monotonic()
        arena, owner = self._arena, self._owner
        if arena is None or owner is None:
            return
        first = self._first()
        # In this order: who received a message before `first` has its flag up until the claim is stored.
        receiving = self._claims.anybody_receives()
        alive: dict[int, bool] = {}
        suspects: set[Block] = set()
        for block in owner.on_loan():
            if arena.table[block.slot] != ON_LOAN:
                continue
            claim = arena.claims[block.slot]
            if claim:
                if claim not in alive:
                    alive[claim] = self._claims.is_alive(claim)
                if not alive[claim]:
                    arena.table[block.slot] = FREE
            elif block.sent[0] < first and not receiving:
                if block in self._suspects:
                    arena.table[block.slot] = FREE
                else:
                    suspects.add(block)
        self._suspects = suspects

    def make_room(self, nbytes: int, deadline: float | None) -> None:
        """Wait until there may be room for ``nbytes``.

        Raises:
            Full: there was none in time.
            ArenaFull: there never will be.
        """
        size = round_block(nbytes)
        arena, owner = cast(ClaimedArena, self._arena), cast(ArenaOwner, self._owner)
        if size > self.budget:
            raise ArenaFull(self._full(nbytes, "This message alone is larger than that."))
        if size > arena.size - SLOTS:
            raise ArenaFull(self._full(nbytes, "No file of this process may be that large (`ulimit -f`)."))
        nap, used = _FIRST_NAP, owner.used
        while True:
            with self._lock:
                self._reclaim()
                owner.recycle()
                if owner.used < used or (self.may_take(owner.committed + size) and owner.fits(size)):
                    self._starved = (0.0, 0.0)
                    self._publish()
                    return
                hopeless = self._is_hopeless(arena, owner)
            if hopeless:
                raise ArenaFull(self._full(nbytes, "All who hold messages wait for the next one."))
            self._check(deadline is None)
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise Full
            time.sleep(nap if deadline is None else min(nap, deadline - now))
            nap = min(2 * nap, _LONGEST_NAP)

    def _is_hopeless(self, arena: ClaimedArena, owner: ArenaOwner) -> bool:
        """Whether it was `_starving` for `STARVED` seconds, over several calls where they do not wait."""
        now = time.monotonic()
        since, seen = self._starved
        if not self._starving(arena, owner):
            self._starved = (0.0, 0.0)
            return False
        since = since if now - seen < STARVED / 2 else now
        self._starved = (since, now)
        return now - since > STARVED

    def _starving(self, arena: ClaimedArena, owner: ArenaOwner) -> bool:
        """Whether all blocks are held by consumers that sleep until a message comes, and none is on its way."""
        mine = self._claims.register().number
        alone = not other_threads()
        for block in owner.on_loan():
            if arena.table[block.slot] == ON_LOAN:
                claim = arena.claims[block.slot]
                if not claim or not (self._claims.waits(claim) or (claim == mine and alone)):
                    return False
        return True

    def _full(self, nbytes: int, why: str) -> str:
        return (
            f"a message needs {nbytes / 1e6:.1f} MB of shared memory, and the memory budget of this channel is "
            f"{self.budget / 1e6:.1f} MB for all who put messages in it. {why} Let go of messages, or raise the budget "
            f"with memory_budget=... or the environment variable {BUDGET_VARIABLE}."
        )

    # ------------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give free pages back and let go of the arena; what was sent stays valid. Idempotent."""
        with self._lock:
            self._arena = self._owner = None
            self._kits.clear()
            self._lately.clear()
            self._published = 0
            _let_go(self._held, self._claims)

    def after_fork_in_child(self) -> None:
        """The arena is the parent's."""
        self._lock = threading.RLock()
        arena, self._arena, self._owner = self._arena, None, None
        self._held.clear()
        self._kits = []
        self._lately = {}
        self._published = 0
        self._suspects = set()
        if arena is not None:
            arena.close()


def _let_go(held: list[Any], claims: Claims) -> None:
    if held:
        arena, owner = held
        held.clear()
        with contextlib.suppress(OSError):
            owner.recycle()
            owner.shrink(0)
        claims.commit(0)
        arena.close()


_all: weakref.WeakSet[Lender] = weakref.WeakSet()


_tidying_pid = 0


def _tidy_at_exit() -> None:
    global _tidying_pid
    if _tidying_pid != os.getpid():  # a forked child does not inherit it
        _tidying_pid = os.getpid()
        util.Finalize(None, _tidy, exitpriority=0)


def _tidy() -> None:
    """Give back the free pages of all arenas: others may look at the rest for long."""
    for lender in list(_all):
        with contextlib.suppress(OSError):
            lender.recycle()
            lender.shrink(0)


def _after_fork_in_child() -> None:
    for lender in list(_all):
        lender.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
