"""Arenas: blocks do not overlap, come back, stay warm, and outlive their owner."""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import resource
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from torchcrew.memory import arena as module
from torchcrew.memory.arena import SLOTS, Arena, ArenaOwner, Block, Loan
from torchcrew.memory.lease import ON_LOAN, open_leases
from torchcrew.testing.crash import run_program

KB, MB, PAGE = 1 << 10, 1 << 20, 4096


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create()
    yield made
    made.close()
    made.__dict__.clear()


def new(owner: ArenaOwner, nbytes: int) -> Block:
    block = owner.allocate(nbytes)
    assert block is not None
    return block


def touch(block: Block, byte: int = 1) -> Block:
    block.view[:] = bytes([byte]) * len(block.view)
    return block


def lend(owner: ArenaOwner, nbytes: int, byte: int = 1) -> Loan:
    return owner.lend(touch(new(owner, nbytes), byte), nbytes)


def test_blocks_are_apart(arena: Arena) -> None:
    """Live blocks have different slots and ranges, behind the table."""
    owner = ArenaOwner(arena)
    blocks = [new(owner, 1 + i * 3000) for i in range(50)]
    ranges = sorted((block.offset, block.offset + block.nbytes) for block in blocks)
    assert ranges[0][0] >= SLOTS
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
    assert len({block.slot for block in blocks}) == 50


def test_a_block_is_taken_again_when_it_has_come_back(arena: Arena) -> None:
    """Not before, and not when it was recycled, though its slot may be another block's by then."""
    owner = ArenaOwner(arena)
    block = touch(new(owner, 3 * PAGE), 5)
    loan = owner.lend(block, 3 * PAGE)
    assert owner.take_again(block) is False
    view = arena.lease(loan)
    assert owner.take_again(block) is False
    del view
    assert owner.take_again(block) is True
    assert owner.take_again(block) is False
    view = arena.lease(loan)
    lend(owner, 3 * PAGE, 6)
    assert bytes(view) == bytes([5]) * len(view)
    del view
    owner.recycle()
    assert owner.take_again(block) is None
    again = lend(owner, 3 * PAGE, 7)
    assert again[0] == block.slot
    assert owner.take_again(block) is None
    assert owner.used == 2 * 3 * PAGE


def test_a_returned_block_is_reused_warm(arena: Arena) -> None:
    """The same pages, so that no fresh ones are needed."""
    owner = ArenaOwner(arena)
    loan = lend(owner, 100 * KB)
    view = arena.lease(loan)
    resident = arena.resident_bytes()
    del view
    again = new(owner, 100 * KB)
    assert (again.offset, again.warm, again.slot) == (loan[1], True, loan[0])
    touch(again)
    assert arena.resident_bytes() == resident


def test_a_block_on_loan_is_not_reused(arena: Arena) -> None:
    """However often others come and go."""
    owner = ArenaOwner(arena)
    view = arena.lease(lend(owner, 10 * KB, 42))
    for byte in range(20):
        arena.lease(lend(owner, 10 * KB, byte))
    assert set(bytes(view)) == {42}


def test_a_discarded_block_is_reused_when_it_is_no_longer_seen_here(arena: Arena) -> None:
    """The dataset may hold what was not sent."""
    owner = ArenaOwner(arena)
    block = touch(new(owner, 10 * KB), 5)
    view = memoryview(block.view)
    owner.discard(block)
    other = new(owner, 10 * KB)
    assert other.offset != block.offset
    del view
    assert new(owner, 10 * KB).offset == block.offset


def test_a_lent_block_that_its_owner_sees_is_not_reused(arena: Arena) -> None:
    """The consumer is done, the dataset's cache is not."""
    owner = ArenaOwner(arena)
    block = touch(new(owner, 10 * KB), 5)
    cached = memoryview(block.view)
    arena.lease(owner.lend(block, 10 * KB))
    owner.recycle()
    assert owner.used == block.nbytes
    touch(new(owner, 10 * KB), 6)
    assert set(cached.cast("B")) == {5}
    del cached
    owner.recycle()
    assert block.slot not in owner._loans


def test_lending_less_than_was_taken_frees_the_rest(arena: Arena) -> None:
    """The tail is the next block's."""
    owner = ArenaOwner(arena)
    block = new(owner, 8 * MB)
    owner.lend(block, 10 * KB)
    assert owner.used == 12 * KB
    assert new(owner, 8 * KB).offset == block.offset + 12 * KB


def test_the_budget_is_asked_before_cold_pages_are_taken(arena: Arena) -> None:
    """It is told how much there would be; warm pages are counted already."""
    asked: list[int] = []

    def may_take(nbytes: int) -> bool:
        asked.append(nbytes)
        return nbytes <= MB

    owner = ArenaOwner(arena, (), may_take)
    assert owner.allocate(2 * MB) is None
    view = arena.lease(lend(owner, 600 * KB))
    assert owner.allocate(600 * KB) is None
    assert owner.committed <= MB
    del view
    asked.clear()
    assert owner.allocate(600 * KB) is not None
    assert asked == []


def test_warm_pages_make_room_for_a_block_that_does_not_fit_in_them(arena: Arena) -> None:
    """They are given back to the system first."""
    owner = ArenaOwner(arena, (), lambda nbytes: nbytes <= 4 * MB)
    views = [arena.lease(lend(owner, 512 * KB)) for _ in range(8)]
    del views[::2]
    assert owner.allocate(MB) is not None
    assert owner.committed <= 4 * MB
    assert arena.resident_bytes() <= 4 * MB
    views.clear()


def test_a_refused_block_changes_nothing(arena: Arena) -> None:
    """Neither slots nor bytes."""
    owner = ArenaOwner(arena, (), lambda nbytes: nbytes <= MB)
    before = (owner.used, owner.committed)
    for _ in range(100):
        assert owner.allocate(2 * MB) is None
    assert (owner.used, owner.committed) == before
    assert new(owner, 4 * KB).slot == 0


def test_when_the_slots_are_used_up(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no block, and no memory is lost by asking."""
    monkeypatch.setattr(module, "SLOTS", 4)
    owner = ArenaOwner(arena)
    views = [arena.lease(lend(owner, 4 * KB)) for _ in range(4)]
    used = owner.used
    for _ in range(3):
        assert owner.allocate(4 * KB) is None
    assert owner.used == used
    del views[2]
    assert new(owner, 4 * KB).slot == 2
    views.clear()


def test_a_refused_mapping_loses_nothing(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where the block is made nor where it is received: `ulimit -v`."""
    owner = ArenaOwner(arena)
    loan = lend(owner, 4 * KB)

    def refuse(*_: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(arena.mapping, "view", refuse)
        with pytest.raises(OSError, match="Cannot allocate"):
            arena.lease(loan)
        with pytest.raises(OSError, match="Cannot allocate"):
            owner.allocate(8 * KB)
    owner.recycle()
    assert owner.used == 0
    assert new(owner, 4 * KB).slot == 0


def test_unused_warm_pages_go_back_to_the_system(arena: Arena) -> None:
    """After a burst an owner keeps no more than it needed lately."""
    owner = ArenaOwner(arena)
    views = [arena.lease(lend(owner, 12 * MB)) for _ in range(6)]
    assert arena.resident_bytes() >= 72 * MB
    views.clear()
    for _ in range(3 * module._REVIEW_EVERY):
        arena.lease(lend(owner, 64 * KB))
    assert arena.resident_bytes() <= module._HOT_MIN + 2 * MB
    assert owner.warm <= module._HOT_MIN + MB


def test_shrinking_spares_what_is_seen(arena: Arena) -> None:
    """Only free pages are punched."""
    owner = ArenaOwner(arena)
    views = [arena.lease(lend(owner, 20 * KB, byte)) for byte in range(10)]
    del views[1::2]
    owner.recycle()
    owner.shrink(0)
    assert owner.warm == 0
    assert [set(bytes(view)) for view in views] == [{byte} for byte in range(0, 10, 2)]


def test_everything_free_is_one_range_again(arena: Arena) -> None:
    """Blocks of many sizes, returned in any order, leave no fragments."""
    owner = ArenaOwner(arena)
    views = [arena.lease(lend(owner, 1 + 7919 * i % 300_000)) for i in range(60)]
    for at in (7, 3, 11):
        del views[::at]
    views.clear()
    owner.recycle()
    owner.shrink(0)
    assert owner.used == owner.warm == 0
    assert len(owner._cold) == 1
    assert len(owner._hot) == 0


# The next owner ----------------------------------------------------------------------------------------------------


def test_the_next_owner_spares_what_is_seen(arena: Arena) -> None:
    """Blocks of the owner that died stay right while anyone holds them, and return to the new one."""
    first = ArenaOwner(arena)
    views = {byte: arena.lease(lend(first, 30 * KB, byte)) for byte in range(10)}
    lend(first, 5 * KB)  # never received
    new(first, 5 * KB)  # never sent
    for byte in range(0, 10, 2):
        del views[byte]
    second = ArenaOwner(arena, open_leases(arena))
    assert second.used == 5 * 32 * KB
    more = [arena.lease(lend(second, 30 * KB, 100 + i)) for i in range(20)]
    assert {byte: set(bytes(view)) for byte, view in views.items()} == {byte: {byte} for byte in range(1, 10, 2)}
    views.clear()
    more.clear()
    second.recycle()
    assert second.used == 0
    assert ON_LOAN not in bytes(arena.table[:100])


def test_the_next_owner_starts_on_warm_pages(arena: Arena) -> None:
    """The first block after a restart costs no fresh page."""
    first = ArenaOwner(arena)
    arena.lease(lend(first, 10 * MB))
    resident = arena.resident_bytes()
    second = ArenaOwner(arena)
    block = new(second, 10 * MB)
    assert block.warm
    touch(block)
    assert arena.resident_bytes() == resident


def test_a_view_dropped_while_nobody_owns_the_arena(arena: Arena) -> None:
    """Is free for the next owner, whenever it learned what was taken."""
    first = ArenaOwner(arena)
    views = [arena.lease(lend(first, 8 * KB)) for _ in range(3)]
    taken = open_leases(arena)
    del views[1]
    second = ArenaOwner(arena, taken)
    second.recycle()
    assert second.used == 2 * 8 * KB
    views.clear()
    second.recycle()
    assert second.used == 0


def test_the_next_owner_keeps_to_the_budget(arena: Arena) -> None:
    """What its predecessor left warm counts."""
    first = ArenaOwner(arena)
    arena.lease(lend(first, 8 * MB))
    second = ArenaOwner(arena, (), lambda nbytes: nbytes <= 4 * MB)
    view = arena.lease(lend(second, 3 * MB))
    for _ in range(5):
        assert second.allocate(2 * MB) is None
        assert second.committed <= 4 * MB
    del view


def test_many_owners_one_after_another(arena: Arena) -> None:
    """Accounts do not drift."""
    held: list[Any] = []
    for generation in range(20):
        owner = ArenaOwner(arena, open_leases(arena))
        held.extend((generation, arena.lease(lend(owner, 3 * KB * (i + 1), generation))) for i in range(5))
        assert all(set(bytes(view)) == {byte} for byte, view in held)
        del held[::2]
    held.clear()
    last = ArenaOwner(arena, open_leases(arena))
    assert last.used == 0


# Processes and limits ----------------------------------------------------------------------------------------------


def test_views_outlive_the_arena() -> None:
    """Closing lets go of the descriptor only."""
    made = Arena.create()
    owner = ArenaOwner(made)
    view = made.lease(lend(owner, 10 * KB, 9))
    made.close()
    made.close()
    del made, owner
    gc.collect()
    assert set(bytes(view)) == {9}
    del view


def _own(arena: Arena, connection: Any, byte: int) -> None:
    owner = ArenaOwner(arena)
    connection.send(lend(owner, 10 * KB, byte))
    connection.recv()


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.timeout(60)
def test_an_owner_in_another_process(arena: Arena, method: str) -> None:
    """The arena travels while a process starts, by descriptor."""
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=_own, args=(arena, theirs, 77))
    process.start()
    assert ours.poll(50)
    view = arena.lease(ours.recv())
    ours.send(None)
    process.join(20)
    process.close()
    ours.close()
    theirs.close()
    assert set(bytes(view)) == {77}
    del view


def test_the_memfd_is_closed_on_exec_and_not_executable(arena: Arena) -> None:
    """Nothing of it reaches a program that is started."""
    assert not os.get_inheritable(arena.mapping.fd)
    with contextlib.suppress(AttributeError):
        assert os.fstat(arena.mapping.fd).st_mode & 0o111 == 0 or os.uname().release < "6.3"


@pytest.mark.parametrize("pages", [0, 100, 1000, 20_000])
def test_ulimit_f(pages: int) -> None:
    """An arena is as large as a file may be; what does not fit is refused, and nothing raises SIGBUS or SIGXFSZ."""
    program = f"""
        import resource
        from torchcrew.memory.arena import Arena, ArenaOwner
        resource.setrlimit(resource.RLIMIT_FSIZE, ({pages * PAGE}, {pages * PAGE}))
        arena = Arena.create()
        owner = ArenaOwner(arena)
        views = []
        while (block := owner.allocate(100_000)) is not None:
            block.view[:] = b"x" * len(block.view)
            views.append(arena.lease(owner.lend(block, 100_000)))
            assert len(views) < 10_000
        total = sum(len(view) for view in views)
        assert total <= {pages * PAGE}, total
        assert total >= {pages * PAGE} * 0.9 - {2 * MB}, total
    """
    run_program(program, timeout=15).check()


def test_ulimit_v() -> None:
    """Where address space runs out, asking for a block is an error, and what is held stays right."""
    program = """
        import resource
        from torchcrew.memory.arena import Arena, ArenaOwner
        arena = Arena.create()
        owner = ArenaOwner(arena)
        now = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (now + (300 << 20), now + (300 << 20)))
        views = []
        try:
            while True:
                block = owner.allocate(30 << 20)
                block.view[:1000] = bytes([len(views)]) * 1000
                views.append(arena.lease(owner.lend(block, 30 << 20)))
                assert len(views) < 100
        except OSError as error:
            assert "Cannot allocate memory" in str(error), error
        assert len(views) >= 4, len(views)
        assert all(set(bytes(view[:1000])) == {i} for i, view in enumerate(views))
        used = owner.used
        views.pop()
        owner.recycle()
        assert owner.used < used
    """
    run_program(program, timeout=15).check()


def test_an_arena_costs_what_is_touched(arena: Arena) -> None:
    """A terabyte of address space is not memory."""
    owner = ArenaOwner(arena)
    new(owner, 1 << 34)
    assert arena.resident_bytes() <= 64 * KB
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_callback_budget_sees_growth_only(arena: Arena) -> None:
    """Steady work asks nobody."""
    calls: list[int] = []
    may_take: Callable[[int], bool] = lambda nbytes: not calls.append(nbytes)  # type: ignore[func-returns-value] # noqa: E731
    owner = ArenaOwner(arena, (), may_take)
    for _ in range(50):
        arena.lease(lend(owner, 100 * KB))
    assert len(calls) <= 2
