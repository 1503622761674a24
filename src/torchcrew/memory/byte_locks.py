"""Locks on single bytes of a file, held by an *open file description*: by its process and by all forked from it.

The kernel drops them with the last holder of the description, however that ends. So a locked byte says that somebody is
there, without a pid, which might be another's by now. (The usual record locks belong to one process, and go when it
closes any descriptor of the file.)
"""

from __future__ import annotations

import fcntl
import os
import struct

__all__ = ("is_locked", "lock", "reopen", "unlock")

#: ``struct flock`` with 64-bit offsets: type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")
_OFD_GETLK, _OFD_SETLK = 36, 37  # the same on every Linux


def reopen(fd: int) -> int:
    """A descriptor of the same file with a description of its own, whose locks no other process shares.

    Raises:
        OSError: no descriptor is left, or /proc is not there.
    """
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def lock(fd: int, at: int) -> bool:
    """Lock one byte; False if another description has it locked."""
    try:
        fcntl.fcntl(fd, _OFD_SETLK, _flock(fcntl.F_WRLCK, at))
    except BlockingIOError:
        return False
    return True


def unlock(fd: int, at: int) -> None:
    """Unlock one byte."""
    fcntl.fcntl(fd, _OFD_SETLK, _flock(fcntl.F_UNLCK, at))


def is_locked(fd: int, at: int) -> bool:
    """Whether another description has the byte locked."""
    found = fcntl.fcntl(fd, _OFD_GETLK, _flock(fcntl.F_WRLCK, at))
    return bool(_FLOCK.unpack_from(found)[0] != fcntl.F_UNLCK)


def _flock(kind: int, at: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, at, 1, 0)
