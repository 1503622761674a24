"""A consumer's hold on a block: from the moment it is received until the last view of it is gone.

    block ◄── view (ctypes array) ◄── storages, tensors, arrays, memoryviews, autograd's saved tensors
                 ▲
                 └─ weak ── Lease ── when the view dies: table[slot] = FREE

Returning a block is one store. It happens in garbage collection, in any thread, anywhere: no lock, no system call, no
exception. (Tensors and arrays hold the view from C, where the cyclic collector does not look: it never takes the view
for garbage before the last of them is freed.)

After a fork, parent and child see the same memory, so a block that was on lease at the fork is handed back only when
the parent's views are gone *and* the child is: the child holds the write end of a pipe (a `_Witness`) which the kernel
closes for it, and for its own children, however they end. The child's own copies of the leases do nothing.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import weakref
from typing import Any

__all__ = ("FREE", "ON_LOAN", "SWEEP_EVERY", "UNUSED", "Lease", "open_leases", "sweep", "sweep_now_and_then")

#: States of a slot. The consumer writes FREE only, the owner everything else.
FREE, ON_LOAN, UNUSED = 0, 1, 2
#: Seconds between two looks at forked children: each costs a system call per child, and they live long (workers do).
SWEEP_EVERY = 0.05


class _Witness:
    """Tells whether a forked child, or any child of it, is still there."""

    def __init__(self) -> None:
        self.ended = False
        try:
            self.read_end, self.write_end = os.pipe()
        except OSError:  # no descriptor left: then the child counts as there for ever, which only costs memory
            self.read_end = self.write_end = -1

    def check(self) -> bool:
        """Whether every process that inherited the write end is gone."""
        if not self.ended and self.read_end >= 0:
            poll = select.poll()
            poll.register(self.read_end, 0)  # hang-up is always reported
            if poll.poll(0):
                self.ended = True
                self.read_end = _close(self.read_end)
        return self.ended


def _close(fd: int) -> int:
    with contextlib.suppress(OSError):
        os.close(fd)
    return -1


class Lease(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a view; its death returns the block.

    Args:
        view: the object whose life is the lease.
        arena: the arena the block lies in (any object; `open_leases` selects by it).
        slot, offset, nbytes: the block, as its owner named it.
    """

    __slots__ = ("arena", "nbytes", "offset", "slot", "table", "witnesses")

    def __new__(cls, view: Any, *_: Any) -> Lease:
        return super().__new__(cls, view, _returned)

    def __init__(self, view: Any, arena: Any, table: Any, slot: int, offset: int, nbytes: int) -> None:
        super().__init__(view, _returned)  # type: ignore[call-arg]
        self.arena = arena
        self.table = table
        self.slot = slot
        self.offset = offset
        self.nbytes = nbytes
        self.witnesses: tuple[_Witness, ...] = ()
        _open[id(self)] = self
        if _deferred:
            sweep_now_and_then()

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other


_open: dict[int, Lease] = {}
_deferred: list[Lease] = []
_witnesses: list[_Witness] = []
_forking = threading.local()
_swept = 0.0
#: Not for finalizers, which take no lock: one thread at a time sweeps, so that no slot is handed back twice. Reentrant,
#: as a signal handler may receive a batch.
_sweeping = threading.RLock()


def _returned(lease: Lease) -> None:
    # First hand back, then forget: `open_leases` in another thread must not miss a slot that is still to be written.
    if all(witness.ended for witness in lease.witnesses):
        lease.table[lease.slot] = FREE
    else:
        _deferred.append(lease)
    _open.pop(id(lease), None)


def open_leases(arena: Any) -> list[tuple[int, int, int]]:
    """``(slot, offset, nbytes)`` of every block of ``arena`` that this process or a forked child of it still sees."""
    with _sweeping:
        sweep()
        leases = {id(lease): lease for lease in (*list(_open.values()), *list(_deferred))}
    return [(lease.slot, lease.offset, lease.nbytes) for lease in leases.values() if lease.arena is arena]


def sweep_now_and_then() -> bool:
    """`sweep` if the last one is `SWEEP_EVERY` seconds ago; whether blocks still wait for a forked child to end."""
    global _swept
    if _deferred and time.monotonic() - _swept > SWEEP_EVERY:
        _swept = time.monotonic()
        sweep()
    return bool(_deferred)


def sweep() -> None:
    """Return blocks that only waited for a forked child to end."""
    with _sweeping:
        for witness in list(_witnesses):
            if witness.check():
                _witnesses.remove(witness)
        for lease in list(_deferred):
            if all(witness.ended for witness in lease.witnesses):
                _deferred.remove(lease)
                lease.table[lease.slot] = FREE


def _before_fork() -> None:
    _forking.witness = None
    if _witnesses:
        sweep()  # or a program that forks often and receives nothing meanwhile runs out of descriptors
    if _open or threading.active_count() > 1:
        # Attached before the fork: a view that another thread drops in between is in the child, too.
        witness = _forking.witness = _Witness()
        _witnesses.append(witness)
        _attach(witness)


def _attach(witness: _Witness) -> None:
    for lease in list(_open.values()):
        if witness not in lease.witnesses:
            lease.witnesses = (*(w for w in lease.witnesses if not w.ended), witness)


def _after_fork_in_parent() -> None:
    witness = getattr(_forking, "witness", None)  # none for a fork that began before this module was imported
    if witness is not None:
        _attach(witness)  # to those that another thread received in between
        witness.write_end = _close(witness.write_end)
        with _sweeping:
            leases = (*list(_open.values()), *list(_deferred))
            if witness in _witnesses and not any(witness in lease.witnesses for lease in leases):
                _witnesses.remove(witness)  # there was nothing to see
                witness.read_end = _close(witness.read_end)


def _after_fork_in_child() -> None:
    global _sweeping
    _sweeping = threading.RLock()  # another thread may have held it
    # The write end stays open until this process, and every child it forks, is gone.
    for witness in _witnesses:
        witness.read_end = _close(witness.read_end)
    _witnesses.clear()
    _deferred.clear()
    _open.clear()  # a weak reference that is gone calls nobody


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
