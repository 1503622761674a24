"""The lease protocol as a state machine: owners, consumers, forks and deaths in any order, and never a wrong byte.

Every block is filled with its serial number (and a version, which in-place writes count up), so that whoever sees a
block can tell whether it is still the one that he was given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.memory.forks import Child
from torchcrew.memory.arena import SLOTS, Arena, ArenaOwner, Block, Loan
from torchcrew.memory.lease import ON_LOAN, open_leases, sweep
from torchcrew.memory.mapping import round_block

PAGE = 4096
BUDGET = 100 * PAGE
CHILDREN = 3
#: Bits of a canary that count in-place writes; the rest is the serial number.
VERSION_BITS = 20

pick = st.integers(0, 1 << 20)
sizes = st.integers(1, 30).map(lambda pages: pages * PAGE - 8 * (pages % 3))

#: Ways to look at a view that is an array of 8-byte integers, from the second one on where that is possible.
DERIVED: dict[str, Callable[[np.ndarray], Any]] = {
    "tensor": torch.from_numpy,
    "slice of a tensor": lambda array: torch.from_numpy(array)[1:],
    "reversed": lambda array: array[::-1],
    "memoryview": lambda array: memoryview(np.ascontiguousarray(array)) if array.flags.c_contiguous else array[1:],
    "dlpack": lambda array: torch.from_dlpack(torch.from_numpy(array)),
    "array from dlpack": lambda array: np.from_dlpack(torch.from_numpy(array)),
    "detached": lambda array: torch.from_numpy(array).detach().view(-1, 1),
    "same": lambda array: array[:],
}


def as_array(view: Any) -> np.ndarray:
    """Any of our views as an array of its integers."""
    if isinstance(view, torch.Tensor):
        return view.view(-1).numpy()
    if isinstance(view, memoryview):
        return np.frombuffer(view, np.int64)
    return np.asarray(view)


@dataclass
class Lent:
    """A block as the model knows it."""

    serial: int
    loan: Loan
    size: int
    version: int = 0

    @property
    def canary(self) -> int:
        return (self.serial << VERSION_BITS) + self.version


@dataclass
class Held:
    """A view that the consumer holds."""

    block: Lent
    view: Any


@dataclass
class Written:
    """A block that its owner has written and not lent yet."""

    serial: int
    block: Block
    size: int


@dataclass
class Forked:
    """A child of the consumer, which is the owner here, too: the blocks that it sees as the one and as the other."""

    child: Child
    blocks: list[Lent] = field(default_factory=list)
    owned: list[int] = field(default_factory=list)  # serials


def serials_are_right(views: list[tuple[int, Any]]) -> bool:
    """Whether each view shows its block; versions may have gone on."""
    return all((as_array(view) >> VERSION_BITS == serial).all() for serial, view in views)


class LeaseMachine(RuleBasedStateMachine):
    """One arena, its owners one after another, one consumer, its forked children."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena.create()
        self.serial = 0
        self.held: list[Held] = []
        self.children: list[Forked] = []
        self.start_owner()

    def start_owner(self) -> None:
        self.owner = ArenaOwner(self.arena, open_leases(self.arena), lambda nbytes: nbytes <= BUDGET)
        self.blocks: dict[int, Block] = {}  # by serial
        for forked in getattr(self, "children", ()):
            forked.owned.clear()
        self.written: list[Written] = []
        self.discarded: list[Written] = []
        self.in_flight: list[Lent] = []
        #: Local views by which the owner still sees blocks: of a dataset that caches batches.
        self.cached: list[tuple[Lent | Written, np.ndarray]] = []

    def seen(self) -> list[Lent]:
        """Blocks that the consumer or one of its children sees."""
        found = {held.block.serial: held.block for held in self.held}
        for forked in self.children:
            found.update((block.serial, block) for block in forked.blocks)
        return list(found.values())

    # The owner

    @rule(size=sizes, share=st.integers(1, 8), cache=st.booleans())
    def allocate(self, size: int, share: int, cache: bool) -> None:
        block = self.owner.allocate(size)
        if block is None:
            assert self.live_bytes() + round_block(size) > BUDGET
            return
        assert block.nbytes >= size
        self.serial += 1
        # A writer takes more than it comes to need; pages that it did not touch do not exist.
        array = np.frombuffer(block.view, np.int64, max(2, size * share // 64))
        array[:] = self.serial << VERSION_BITS
        self.blocks[self.serial] = block
        self.written.append(Written(self.serial, block, array.nbytes))
        if cache:
            self.cached.append((self.written[-1], array[1:]))

    @precondition(lambda self: self.written)
    @rule(at=pick)
    def lend(self, at: int) -> None:
        written = self.written.pop(at % len(self.written))
        lent = Lent(written.serial, self.owner.lend(written.block, written.size), written.size)
        assert lent.loan[2] == round_block(written.size)
        self.in_flight.append(lent)
        self.cached = [(lent, array) if block is written else (block, array) for block, array in self.cached]

    @precondition(lambda self: self.written)
    @rule(at=pick)
    def discard(self, at: int) -> None:
        written = self.written.pop(at % len(self.written))
        self.owner.discard(written.block)
        self.discarded.append(written)

    @precondition(lambda self: self.cached)
    @rule(at=pick)
    def forget_cached(self, at: int) -> None:
        del self.cached[at % len(self.cached)]

    @rule(keep=st.integers(0, 50))
    def shrink(self, keep: int) -> None:
        self.owner.shrink(keep * PAGE)
        assert self.owner.warm <= keep * PAGE

    @rule(drained=st.booleans())
    def owner_dies(self, drained: bool) -> None:
        while drained and self.in_flight:
            self.receive(0, "same")
        self.written, self.discarded, self.cached = [], [], []
        self.start_owner()

    # The consumer

    @precondition(lambda self: self.in_flight)
    @rule(at=pick, kind=st.sampled_from(sorted(DERIVED)))
    def receive(self, at: int, kind: str) -> None:
        block = self.in_flight.pop(at % len(self.in_flight))
        array = np.frombuffer(self.arena.lease(block.loan), np.int64, block.size // 8)
        self.held.append(Held(block, DERIVED[kind](array)))

    @precondition(lambda self: self.in_flight)
    @rule()
    def receive_and_drop_at_once(self) -> None:
        self.arena.lease(self.in_flight.pop(0).loan)

    @precondition(lambda self: self.held)
    @rule(at=pick, kind=st.sampled_from(sorted(DERIVED)))
    def look_otherwise(self, at: int, kind: str) -> None:
        held = self.held[at % len(self.held)]
        array = as_array(held.view)
        if array.size > 16 and min(array.strides) > 0:
            self.held.append(Held(held.block, DERIVED[kind](array)))

    @precondition(lambda self: self.held)
    @rule(at=pick, count=st.integers(1, 5))
    def drop(self, at: int, count: int) -> None:
        for _ in range(min(count, len(self.held))):
            del self.held[at % len(self.held)]

    @precondition(lambda self: self.held)
    @rule(at=pick)
    def write(self, at: int) -> None:
        block = self.held[at % len(self.held)].block
        block.version += 1
        for views in ([h.view for h in self.held if h.block is block], [v for b, v in self.cached if b is block]):
            for view in views:
                as_array(view)[:] = block.canary

    @precondition(lambda self: len(self.children) < CHILDREN)
    @rule()
    def fork(self) -> None:
        views = [(held.block.serial, held.view) for held in self.held]
        blocks = self.seen_here()
        owned = [w.serial for w in self.written] + [block.serial for block, _ in self.cached]
        self.children.append(Forked(Child(lambda: 0 if serials_are_right(views) else 1), blocks, owned))

    def seen_here(self) -> list[Lent]:
        return list({held.block.serial: held.block for held in self.held}.values())

    @precondition(lambda self: self.children)
    @rule(at=pick, kill=st.booleans())
    def child_ends(self, at: int, kill: bool) -> None:
        forked = self.children.pop(at % len(self.children))
        if kill:
            assert forked.child.kill() == -9
        else:
            assert forked.child.end() == 0, "a child saw a block that was not its own any more"

    # What always holds

    def live(self) -> list[tuple[int, Loan]]:
        """Serial and range of every block that somebody needs."""
        found = {b.serial: b.loan for b in (*self.in_flight, *self.seen())}
        found.update((w.serial, (w.block.slot, w.block.offset, w.block.nbytes)) for w in self.written)
        for block, _ in self.cached:
            loan = block.loan if isinstance(block, Lent) else None
            found[block.serial] = loan or (block.block.slot, block.block.offset, block.block.nbytes)  # type: ignore[union-attr]
        for serial in (serial for forked in self.children for serial in forked.owned):
            block = self.blocks[serial]
            found[serial] = (block.slot, block.offset, block.nbytes)
        return sorted(found.items())

    def live_bytes(self) -> int:
        return sum(loan[2] for _, loan in self.live())

    @invariant()
    def no_byte_is_wrong(self) -> None:
        for held in self.held:
            array = as_array(held.view)
            # A view may show more than the one that was written to, so that versions differ; serials never do.
            assert (array >> VERSION_BITS == held.block.serial).all()
        for block, array in self.cached:
            assert (array >> VERSION_BITS == block.serial).all()
        for written in self.written:
            assert (
                np.frombuffer(written.block.view, np.int64, written.size // 8) >> VERSION_BITS == written.serial
            ).all()

    @invariant()
    def no_two_blocks_overlap(self) -> None:
        loans = [loan for _, loan in self.live()]
        assert len({slot for slot, _, _ in loans}) == len(loans)
        end = SLOTS
        for _, offset, nbytes in sorted(loans, key=lambda loan: loan[1]):
            assert offset >= end
            end = offset + nbytes

    @invariant()
    def open_leases_are_what_is_seen(self) -> None:
        assert sorted(open_leases(self.arena)) == sorted(block.loan for block in self.seen())

    @invariant()
    def the_accounts_are_right(self) -> None:
        sweep()
        self.owner.recycle()
        assert self.owner.used == self.live_bytes()
        assert self.owner.committed == self.owner.used + self.owner.warm <= BUDGET
        free = [range_ for ranges in (self.owner._hot, self.owner._cold) for range_ in ranges]
        assert self.owner.warm == sum(end - start for start, end in self.owner._hot)
        assert sum(end - start for start, end in free) + self.owner.used == self.arena.size // PAGE * PAGE - SLOTS
        on_loan = {block.loan[0] for block in (*self.in_flight, *self.seen())}
        for slot in on_loan:
            assert self.arena.table[slot] == ON_LOAN
        assert self.arena.resident_bytes() <= BUDGET + 2 * PAGE

    def teardown(self) -> None:
        try:
            for forked in self.children:
                assert forked.child.end() == 0
            self.children, self.held, self.cached = [], [], []
            for block in self.in_flight:
                self.arena.lease(block.loan)
            for written in self.written:
                self.owner.discard(written.block)
            self.in_flight, self.written = [], []
            sweep()
            self.owner.recycle()
            self.owner.shrink(0)
            assert self.owner.used == self.owner.committed == 0
            assert len(self.owner._cold) == 1
            assert open_leases(self.arena) == []
            assert ON_LOAN not in bytes(self.arena.table[: self.owner._high])
        finally:
            self.arena.close()
            self.__dict__.clear()


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        LeaseMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_any_order_of_events() -> None:
    """Some hundred short histories."""
    run(examples=40, steps=40)


@pytest.mark.faults
@pytest.mark.timeout(1200)
def test_any_order_of_events_for_long() -> None:
    """Thousands of longer ones."""
    run(examples=1500, steps=80)
