"""Memory of large shared tensors, kept and used again when nobody has it any more: fresh pages cost more than the copy.

    this process                                       whoever has the tensor
      spare ── probe: an open file of its own            storage, mapping, message in flight, forked child
         └──────────── memfd ────────────────────────────── one other open file, or several

Every use of the memory (a mapping, a descriptor on its way, a child's copy of either) keeps the open file that it came
with, which is never the probe. The kernel grants a write lease to who has the only open file of a memfd: that is how we
know that nobody else is left, whoever it was and however it ended. No count is kept that a killed process could spoil.

Owner      the process that made it. A forked child forgets its parent's spares: two would think that they are alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading

from torchcrew.memory import libc
from torchcrew.memory.arena import make_memfd
from torchcrew.memory.limits import default_budget

__all__ = ("SMALLEST", "idle_bytes", "take", "trim")

#: Bytes from which a memfd is worth to be kept: for less, opening it again costs as much as fresh pages.
SMALLEST = 512 << 10
#: Bytes that are kept at most, in use or not, and the share of the default budget on small machines.
_KEPT, _SHARE = 128 << 20, 1 / 16
#: Memfds that are kept at most: each costs a descriptor.
_COUNT = 32
#: How much larger than what is asked for a memfd may be.
_SLACK = 1.25

#: Probe -> bytes; the least recently used first.
_spares: dict[int, int] = {}
_lock = threading.Lock()
_works: bool | None = None


def take(name: str, nbytes: int) -> int:
    """A memfd of at least ``nbytes``, whose content is anything; the descriptor is the caller's.

    Raises:
        OSError: there is none to be had.
    """
    if nbytes < SMALLEST or _works is False:
        return make_memfd(name, nbytes)
    with _lock:
        for probe, size in reversed(list(_spares.items())):
            if nbytes <= size <= nbytes * _SLACK and _is_unused(probe):
                fd = _open_again(probe)
                _spares[probe] = _spares.pop(probe)
                return fd
    limit = _limit()
    return _make(name, nbytes, limit) if nbytes <= limit // 2 else make_memfd(name, nbytes)


def trim() -> None:
    """Keep nothing: memory that nobody uses goes back to the system, the rest when it is let go of."""
    with _lock:
        for probe in _spares:
            os.close(probe)
        _spares.clear()


def idle_bytes() -> int:
    """Memory that is kept and that nobody uses."""
    with _lock:
        return sum(size for probe, size in _spares.items() if _is_unused(probe))


def _make(name: str, nbytes: int, limit: int) -> int:
    global _works
    size = -(-nbytes // libc.PAGE) * libc.PAGE
    first = make_memfd(name, size)
    try:
        # The file as it was created is not counted among the open ones.
        probe = _open_again(first)
    except OSError:  # no /proc, or no descriptor is left
        return first
    os.close(first)
    try:
        if _works is None:
            _works = _is_unused(probe)
        fd = _open_again(probe)
        if _works and _is_unused(probe):
            _works = False
    except OSError:
        return probe
    if not _works:
        os.close(probe)
        return fd
    with _lock:
        _spares[probe] = size
        while len(_spares) > _COUNT or sum(_spares.values()) > limit:
            oldest = next(iter(_spares))
            del _spares[oldest]
            os.close(oldest)
    return fd


def _open_again(fd: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def _is_unused(probe: int) -> bool:
    try:
        fcntl.fcntl(probe, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return False
    fcntl.fcntl(probe, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


def _limit() -> int:
    with contextlib.suppress(ValueError):  # a nonsensical TORCHCREW_BUDGET: no place to say so
        return min(_KEPT, int(default_budget() * _SHARE))
    return _KEPT


def _forget_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    for probe in _spares:
        os.close(probe)
    _spares.clear()


os.register_at_fork(after_in_child=_forget_in_child)
