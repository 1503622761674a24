"""Idle arenas: kept for the next worker, bounded, and not a forked child's."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from torchcrew import memory
from torchcrew.memory import pool
from torchcrew.memory.arena import Arena, ArenaOwner
from torchcrew.memory.lease import open_leases

MB = 1 << 20


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    pool.trim()
    yield
    pool.trim()


def fill(arena: Arena, nbytes: int) -> None:
    owner = ArenaOwner(arena)
    block = owner.allocate(nbytes)
    assert block is not None
    block.view[:] = b"x" * len(block.view)


def test_the_same_arenas_come_back_in_the_same_order() -> None:
    """The first worker of the next epoch starts on the pages of the first worker of this one."""
    arenas = [pool.take() for _ in range(3)]
    pool.put_back(arenas)
    again = [pool.take() for _ in range(3)]
    assert again == arenas
    pool.put_back(again)


def test_idle_memory_is_told_and_trimmed() -> None:
    """`trim` gives all of it back."""
    arena = pool.take()
    fill(arena, 5 * MB)
    assert memory.idle_bytes() == 0
    pool.put_back([arena])
    assert 5 * MB <= memory.idle_bytes() < 6 * MB
    memory.trim()
    assert memory.idle_bytes() == 0
    assert arena.mapping.fd == -1
    del arena


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By bytes and by number; the most recently used stay."""
    monkeypatch.setattr(pool, "IDLE_MAX", 3 * MB)
    monkeypatch.setattr(pool, "IDLE_COUNT", 3)
    large, *small = [pool.take() for _ in range(6)]
    fill(large, 8 * MB)
    for arena in small:
        fill(arena, MB // 2)
    pool.put_back([large])
    assert memory.idle_bytes() == 0
    pool.put_back(small)
    assert len(pool._idle) == 3
    assert [pool.take() for _ in range(3)] == small[:3]
    pool.put_back(small[:3])
    assert large.mapping.fd == -1


def test_the_bound_follows_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a small machine less is kept; a budget that cannot be read must not lose the arenas."""
    monkeypatch.setenv("TORCHCREW_BUDGET", "8MB")
    arena = pool.take()
    fill(arena, 2 * MB)
    pool.put_back([arena])
    assert memory.idle_bytes() == 0
    assert arena.mapping.fd == -1


def test_an_unreadable_budget_loses_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arenas return when an iterator closes, where an error would come too late to help anybody."""
    monkeypatch.setenv("TORCHCREW_BUDGET", "lots")
    arena = pool.take()
    pool.put_back([arena])
    monkeypatch.delenv("TORCHCREW_BUDGET")
    pool.trim()
    assert arena.mapping.fd == -1


def test_views_survive_trimming() -> None:
    """A batch that is held keeps its memory."""
    arena = pool.take()
    owner = ArenaOwner(arena)
    block = owner.allocate(MB)
    assert block is not None
    block.view[:] = b"k" * len(block.view)
    view = arena.lease(owner.lend(block, MB))
    del block, owner
    pool.put_back([arena])
    memory.trim()
    assert set(bytes(view)) == {ord("k")}
    assert len(open_leases(arena)) == 1
    del view


def test_a_forked_child_has_none() -> None:
    """Two owners of one arena would overwrite each other."""
    arena = pool.take()
    pool.put_back([arena])
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if not pool._idle and pool.take() is not arena else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert pool.take() is arena
    pool.put_back([arena])


def test_taking_in_several_threads() -> None:
    """Nobody gets an arena that another has."""
    pool.put_back([pool.take() for _ in range(8)])
    taken: list[Arena] = []

    def work() -> None:
        taken.extend(pool.take() for _ in range(4))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(arena) for arena in taken}) == 16
    pool.put_back(taken)
    taken.clear()
