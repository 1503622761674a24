"""Idle arenas of this process, kept so that the next worker starts on warm pages.

The consumer makes the arenas, lends each to one worker for the worker's life, and takes it back when the worker is gone
(dead or not, by whatever end). What the pool keeps warm is bounded; `trim` empties it.
"""

from __future__ import annotations

import contextlib
import os
import threading

from torchcrew.memory import spares
from torchcrew.memory.arena import Arena
from torchcrew.memory.lease import sweep
from torchcrew.memory.limits import default_budget

__all__ = ("idle_bytes", "put_back", "take", "trim")

#: Bytes that idle arenas may keep in memory: enough for the usual few batches of a loader's workers.
IDLE_MAX = 512 << 20
#: Share of the default budget that idle arenas may keep, on small machines.
IDLE_SHARE = 1 / 8
#: Idle arenas, whatever their size: each costs a descriptor.
IDLE_COUNT = 64

_idle: list[Arena] = []
_lock = threading.Lock()


def take() -> Arena:
    """The most recently used idle arena, or a new one."""
    with _lock:
        if _idle:
            return _idle.pop()
    return Arena.create()


def put_back(arenas: list[Arena]) -> None:
    """Keep ``arenas`` for the next workers, as far as the bounds allow; their workers must be gone."""
    sweep()  # the workers may have been the last that saw some blocks
    limit = IDLE_MAX
    with contextlib.suppress(ValueError):  # a nonsensical TORCHCREW_BUDGET: an iterator's end is no place to say so
        limit = min(IDLE_MAX, int(default_budget() * IDLE_SHARE))
    with _lock:
        # Reversed, so that the first worker of the next epoch gets the arena of the first worker of this one.
        _idle.extend(reversed(arenas))
        kept: list[Arena] = []
        total = 0
        for arena in reversed(_idle):
            resident = arena.resident_bytes()
            if total + resident > limit or len(kept) == IDLE_COUNT:
                arena.close()
            else:
                kept.append(arena)
                total += resident
        _idle[:] = reversed(kept)


def idle_bytes() -> int:
    """Memory that idle arenas, and shared tensors that are gone, take."""
    with _lock:
        return sum(arena.resident_bytes() for arena in _idle) + spares.idle_bytes()


def trim() -> None:
    """Close every idle arena: the memory that no batch and no shared tensor uses goes back to the system."""
    sweep()
    spares.trim()
    with _lock:
        idle = _idle[:]
        _idle.clear()
    for arena in idle:
        arena.close()


def _forget_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    for arena in _idle:
        arena.close()
    _idle.clear()


os.register_at_fork(after_in_child=_forget_in_child)
