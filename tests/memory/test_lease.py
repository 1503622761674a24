"""A lease ends with the last view of the block, and with the last forked child that sees it."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.memory.forks import Child
from torchcrew.memory import lease as module
from torchcrew.memory.arena import Arena, ArenaOwner
from torchcrew.memory.lease import FREE, ON_LOAN, UNUSED, Lease, open_leases, sweep

KB = 1 << 10


class Store:
    """An arena with a consumer and an owner in this process."""

    def __init__(self) -> None:
        self.arena = Arena.create()
        self.owner = ArenaOwner(self.arena)

    def lent(self, nbytes: int = 8 * KB, byte: int = 7) -> Any:
        """A block, filled, lent and received."""
        block = self.owner.allocate(nbytes)
        assert block is not None
        block.view[:] = bytes([byte]) * len(block.view)
        self.slot = block.slot
        return self.arena.lease(self.owner.lend(block, nbytes))

    def state(self, slot: int | None = None) -> int:
        """What the table says, children that ended considered."""
        sweep()
        return self.arena.table[self.slot if slot is None else slot]


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store()
    yield made
    made.arena.close()
    made.__dict__.clear()
    sweep()


VIEWS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda view: view,
    "memoryview": lambda view: memoryview(view).cast("B")[5:],
    "tensor": lambda view: torch.frombuffer(view, dtype=torch.uint8)[3:].view(-1)[1:],
    "storage": lambda view: torch.frombuffer(view, dtype=torch.uint8).untyped_storage(),
    "array": lambda view: np.frombuffer(view, np.uint8)[3:][::2],
    "array of a tensor": lambda view: torch.frombuffer(view, dtype=torch.uint8).numpy()[1:],
    "tensor of an array": lambda view: torch.from_numpy(np.frombuffer(view, np.uint8)),
    "dlpack": lambda view: torch.from_dlpack(torch.frombuffer(view, dtype=torch.uint8)),
    "dlpack capsule": lambda view: torch.utils.dlpack.to_dlpack(torch.frombuffer(view, dtype=torch.uint8)),
    "iterator": lambda view: iter(torch.frombuffer(view, dtype=torch.uint8)),
    "graph": lambda view: (torch.frombuffer(view, dtype=torch.float32) * torch.ones(1, requires_grad=True)).grad_fn,
    "parameter": lambda view: torch.nn.Parameter(torch.frombuffer(view, dtype=torch.float32)),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_every_kind_of_view_keeps_the_block(store: Store, kind: str) -> None:
    """And the moment it goes, the block is free."""
    held = VIEWS[kind](store.lent())
    gc.collect(0)
    assert store.state() == ON_LOAN
    assert open_leases(store.arena)[0][0] == store.slot
    del held
    assert store.state() == FREE
    assert open_leases(store.arena) == []


def test_views_dropped_in_another_thread(store: Store) -> None:
    """Returning works wherever the last reference goes."""
    box = [store.lent()]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert store.state() == FREE


def test_a_view_in_garbage_keeps_the_block_until_it_is_collected(store: Store) -> None:
    """Tensors in cycles are collected later; their finalizers still see their bytes."""
    seen: list[int] = []

    class Holder:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor, self.me = tensor, self

        def __del__(self) -> None:
            seen.append(int(self.tensor[0]))
            seen.append(store.arena.table[store.slot])

    holder = Holder(torch.frombuffer(store.lent(), dtype=torch.uint8))
    del holder
    assert store.state() == ON_LOAN
    gc.collect()
    assert seen == [7, ON_LOAN]
    assert store.state() == FREE


def test_leases_are_told_apart_by_arena(store: Store) -> None:
    """`open_leases` answers for one arena."""
    other = Store()
    view, elsewhere = store.lent(), other.lent()
    assert len(open_leases(store.arena)) == len(open_leases(other.arena)) == 1
    del view, elsewhere
    other.arena.close()


def test_leases_are_compared_by_identity(store: Store) -> None:
    """Two leases of equal views are two."""
    view = store.lent()
    table = bytearray(4)
    a, b = (Lease(view, None, table, slot, 0, 0) for slot in (1, 2))
    assert a == a
    assert a != b
    assert len({a, b}) == 2
    del a, b, view
    assert list(table) == [0, FREE, FREE, 0]


# Forks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["end", "kill"])
def test_a_block_seen_by_a_child_is_kept_until_the_child_is_gone(store: Store, how: str) -> None:
    """The parent dropped it, the child still looks."""
    box = [store.lent()]
    child = Child(lambda: 0 if set(bytes(box[0])) == {7} else 1)
    box.clear()
    assert store.state() == ON_LOAN
    assert len(open_leases(store.arena)) == 1
    assert getattr(child, how)() == (0 if how == "end" else -9)
    assert store.state() == FREE
    assert open_leases(store.arena) == []


def test_a_child_that_drops_a_view_returns_nothing(store: Store) -> None:
    """The parent still holds it."""
    box = [store.lent()]

    def work() -> int:
        box.clear()
        gc.collect()
        return store.arena.table[store.slot]

    assert Child(work).end() == ON_LOAN
    assert store.state() == ON_LOAN
    box.clear()
    assert store.state() == FREE


def test_a_grandchild_keeps_the_block(store: Store) -> None:
    """Children of children see it, too, also after their parent ended."""
    view = store.lent()
    read, write = os.pipe()

    def work() -> None:
        if os.fork() == 0:
            signal.alarm(30)
            os.close(write)
            os.read(read, 1)
            os._exit(0)

    child = Child(work)
    child.end()
    del view
    assert store.state() == ON_LOAN
    os.close(read)
    os.close(write)  # the grandchild reads the end of file
    end = time.monotonic() + 5
    while store.state() != FREE and time.monotonic() < end:
        time.sleep(0.005)
    assert store.state() == FREE


def test_a_child_that_executes_another_program_sees_nothing(store: Store) -> None:
    """`exec` unmaps the memory and closes the witness."""
    view = store.lent()
    pid = os.fork()
    if pid == 0:
        os.execv("/bin/sleep", ["sleep", "20"])
    del view
    end = time.monotonic() + 5
    while store.state() != FREE and time.monotonic() < end:
        time.sleep(0.005)
    state = store.state()
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    assert state == FREE


def test_a_block_received_after_the_fork_is_no_business_of_the_child(store: Store) -> None:
    """It returns at once."""
    first = store.lent()
    child = Child()
    second = store.lent()
    del second
    assert store.state() == FREE
    del first
    child.end()


def test_a_view_dropped_after_its_child_ended_returns_at_once(store: Store) -> None:
    """Without another fork, another lease or a sweep."""
    view = store.lent()
    Child().end()
    sweep()
    del view
    assert store.arena.table[store.slot] == FREE


def test_blocks_come_back_with_later_leases(store: Store) -> None:
    """Nobody needs to sweep by hand: lending and receiving do it, and the block is used again."""
    view = store.lent()
    slot = store.slot
    child = Child()
    del view
    child.end()
    time.sleep(module.SWEEP_EVERY)
    later = store.lent()
    assert store.slot == slot
    del later


def test_two_children_that_overlap(store: Store) -> None:
    """The block waits for both, in either order."""
    for order in ((0, 1), (1, 0)):
        view = store.lent()
        children = [Child(), Child()]
        del view
        children[order[0]].end()
        assert store.state() == ON_LOAN
        children[order[1]].end()
        assert store.state() == FREE


def test_many_short_forks_use_no_descriptors(store: Store) -> None:
    """A program that holds one batch and forks for every step."""
    view = store.lent()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(30):
        Child().end()
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    sweep()
    assert len(os.listdir("/proc/self/fd")) == before
    del view


def test_forking_without_descriptors_to_spare(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the child counts as there for ever: memory is lost, no byte is wrong."""
    view = store.lent()

    def refuse() -> Any:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "pipe", refuse)
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    del view
    assert store.state() == ON_LOAN
    witness = module._deferred[0].witnesses[0]
    witness.ended = True
    sweep()
    module._witnesses.clear()
    assert store.state() == FREE


def test_forking_in_a_thread_while_another_receives(store: Store) -> None:
    """Blocks received and dropped while other threads fork: in the end all are free, and bytes are never wrong."""
    wrong: list[int] = []
    children: list[Child] = []
    stop = threading.Event()

    def fork() -> None:
        while not stop.is_set() and len(children) < 15:
            children.append(Child())
            time.sleep(0.002)

    thread = threading.Thread(target=fork)
    thread.start()
    held = []
    for i in range(300):
        view = store.lent(byte=i % 250)
        held.append((i % 250, view))
        if len(held) > 5:
            byte, old = held.pop(0)
            wrong.extend([i] if set(memoryview(old).cast("B")) != {byte} else [])
            del old
    stop.set()
    thread.join()
    for child in children:
        child.end()
    del view
    held.clear()
    sweep()
    assert wrong == []
    assert open_leases(store.arena) == []
    store.owner.recycle()
    assert store.owner.used == 0
    assert ON_LOAN not in bytes(store.arena.table[:1000])
    assert UNUSED in bytes(store.arena.table[:1000])


def test_sweeping_in_several_threads(store: Store) -> None:
    """Nobody hands a slot back twice."""
    for _ in range(20):
        views = [store.lent() for _ in range(5)]
        child = Child()
        views.clear()
        child.end()
        threads = [threading.Thread(target=sweep) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store.owner.recycle()
        assert store.owner.used == 0


def test_a_fork_beside_threads_with_nothing_on_lease_leaves_nothing() -> None:
    """The witness, made because another thread might receive something, goes at once."""
    before = sorted(os.listdir("/proc/self/fd"))
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    child = Child()
    assert module._witnesses == []
    stop.set()
    thread.join()
    child.end()
    assert sorted(os.listdir("/proc/self/fd")) == before
