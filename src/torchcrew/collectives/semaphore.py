"""A POSIX semaphore in shared memory, with the operations of the standard library's C type.

`sem_post` releases and `sem_wait` acquires (POSIX.1, 4.12 "Memory Synchronization"; a release and an acquire operation
on one atomic word in glibc and musl): what a rank has written before it posts, who waited for the post reads, on
aarch64 as on x86-64. A wait sleeps in a futex, without the interpreter's lock, and sees Ctrl-C.
"""

from __future__ import annotations

import ctypes
from importlib import import_module
from typing import Any

__all__ = ("BYTES", "at", "initialize")

#: Bytes for a `sem_t` (32 on 64-bit Linux), and the rest of the line of the cache that it has for itself.
BYTES = 64
#: `SEMAPHORE` of `multiprocessing.synchronize`: one that counts, and has no holder.
_COUNTS = 1
_MOST = 2**31 - 1  # SEM_VALUE_MAX of glibc

_libc = ctypes.CDLL(None, use_errno=True)
_SemLock: Any = import_module("_multiprocessing").SemLock  # what `multiprocessing.Semaphore` is made of


def initialize(address: int, value: int = 0) -> None:
    """Make a semaphore of a value at ``address``, which processes share. Nothing has to be destroyed."""
    if _libc.sem_init(ctypes.c_void_p(address), 1, value) != 0:
        raise OSError(ctypes.get_errno(), "sem_init")


def at(address: int) -> Any:
    """The semaphore at ``address``: `acquire(block, timeout)` and `release()`, as of `multiprocessing.Semaphore`.

    The memory has to stay mapped as long as it is used.
    """
    # `_rebuild` is how a started process gets the semaphores of its parent: by this number, the address of a `sem_t`.
    return _SemLock._rebuild(address, _COUNTS, _MOST, None)
