"""System calls that Python's standard library lacks or does in a way we cannot use.

`mmap.mmap` duplicates the descriptor for every mapping; an arena has many extents and may use one descriptor only.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

__all__ = (
    "PAGE",
    "copy",
    "map_private",
    "map_read_only",
    "map_shared",
    "punch",
    "set_death_signal",
    "unmap",
    "view_of",
    "write_all",
)

PAGE = mmap.PAGESIZE
_MADV_DONTDUMP = 16
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_PR_SET_PDEATHSIG = 1
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

copy = ctypes.memmove


def _check(failed: bool, what: str) -> None:
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def map_shared(fd: int, offset: int, nbytes: int) -> int:
    """Map ``nbytes`` of ``fd`` readable, writable and shared, kept out of core dumps; returns the address.

    Raises:
        OSError: the kernel refuses (ENOMEM: address space, as under ``ulimit -v``).
    """
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, offset)
    _check(address == _MAP_FAILED, f"mapping {nbytes} bytes of shared memory")
    # Without this a process that aborts writes the whole sparse mapping into its core: gigabytes and seconds.
    _libc.madvise(address, nbytes, _MADV_DONTDUMP)
    return int(address)


def map_private(fd: int, nbytes: int) -> int:
    """Map the first ``nbytes`` of ``fd`` such that what is written here nobody else sees; returns the address.

    The pages are the file's until they are written. The file shall not change any more.

    Raises:
        OSError: the kernel refuses (ENOMEM: address space, as under ``ulimit -v``).
    """
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, fd, 0)
    _check(address == _MAP_FAILED, f"mapping {nbytes} bytes of shared memory")
    _libc.madvise(address, nbytes, _MADV_DONTDUMP)
    return int(address)


def map_read_only(fd: int, nbytes: int) -> int:
    """Map the first ``nbytes`` of ``fd`` for reading, kept out of core dumps; returns the address.

    Private, which nobody can tell from shared where nobody writes: before Linux 6.7 a memfd that is sealed against
    writing cannot be mapped shared at all. The pages are the file's, one copy for all processes.

    Raises:
        OSError: the kernel refuses (ENOMEM: address space, as under ``ulimit -v``).
    """
    address = _libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_PRIVATE, fd, 0)
    _check(address == _MAP_FAILED, f"mapping {nbytes} bytes of shared memory")
    _libc.madvise(address, nbytes, _MADV_DONTDUMP)
    return int(address)


def unmap(address: int, nbytes: int) -> None:
    """Unmap what `map_shared` mapped."""
    _libc.munmap(address, nbytes)


def view_of(address: int, nbytes: int) -> Any:
    """The bytes of a mapping as a ctypes array; unmapped when that, and all that is made of it, are gone."""
    view = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(view, unmap, address, nbytes).atexit = False
    return view


def write_all(fd: int, data: Any, offset: int = 0) -> None:
    """Write every byte of a buffer at ``offset``; one call of the system writes 2 GiB at most.

    Raises:
        OSError: as `os.pwrite`.
    """
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def set_death_signal(signum: int) -> None:
    """Have the kernel send ``signum`` to this process when the *thread* that forked it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def punch(fd: int, offset: int, nbytes: int) -> None:
    """Give whole pages of a memfd back to the system; they read as zeros afterwards (what MADV_REMOVE does).

    Raises:
        OSError: the kernel refuses.
    """
    _check(_libc.fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, offset, nbytes) != 0, "fallocate")
