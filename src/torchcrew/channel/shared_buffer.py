"""One memfd that many processes look at: written once by its maker, mapped once in every process.

    maker                                        any process
      BufferWriter ── write(2), then sealed ─┐
                                             ├─► memfd ◄── SharedBuffer: one mapping, one descriptor a process
      write_range  ── tensors and arrays ────┘               ▲
                                                             └── views: memoryviews, storages, arrays

Owner      each process that holds a `SharedBuffer` owns its descriptor and its mapping; nobody serves it.
Closing    the descriptor goes with the `SharedBuffer`, the mapping with the last view.
Death      nothing to do: the memfd has no name, and the kernel frees it with the last process that has it.

Objects are in buffers that are sealed, where the kernel can, and mapped for reading only. Tensors and arrays are in
buffers that everybody may write.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import weakref
from multiprocessing import reduction
from typing import Any

from torchcrew.channel.sharing import STAND_IN, Keep, pass_descriptor
from torchcrew.errors import ArenaFull, TooManyDescriptors
from torchcrew.memory import libc
from torchcrew.memory.arena import make_memfd
from torchcrew.memory.limits import BUDGET_VARIABLE, default_budget
from torchcrew.memory.mapping import round_block

__all__ = ("Allowance", "BufferWriter", "SharedBuffer", "new_data_buffer", "new_memfd", "write_range")

#: Bytes that are written at once from an address; ctypes keeps a type for ever for each size.
_PIECE = 1 << 20
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_TOKEN_BYTES = 16

# Buffers of this process by token: a buffer that comes once more (it is sent twice, or sent back) is the one we have.
_known: weakref.WeakValueDictionary[bytes, SharedBuffer] = weakref.WeakValueDictionary()


class Allowance:
    """The bytes that one call of `share` may take.

    Args:
        nbytes: how many; None for `default_budget`.
    """

    def __init__(self, nbytes: int | None = None) -> None:
        self.limit = default_budget() if nbytes is None else nbytes
        self.taken = 0

    def take(self, nbytes: int) -> None:
        """Count bytes that are about to be taken.

        Raises:
            ArenaFull: there would be more than the budget.
        """
        self.taken += nbytes
        if self.taken > self.limit:
            raise ArenaFull(
                f"the shared copy needs more than its budget of {self.limit:,} bytes. Raise the budget: "
                f"memory_budget=..., or the environment variable {BUDGET_VARIABLE} (default: half of the memory limit)"
            )


class SharedBuffer:
    """A memfd of this process, mapped. Pickles by descriptor.

    Args:
        fd: the memfd; this object owns it from now on.
        nbytes: its size.
        token: what it is known by in all processes.
        writable: whether it is mapped for writing.

    Raises:
        OSError: the address space is exhausted.
    """

    __slots__ = ("__weakref__", "fd", "nbytes", "token", "view", "writable")

    def __init__(self, fd: int, nbytes: int, token: bytes, writable: bool) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd).atexit = False
        self.nbytes = nbytes
        self.token = token
        self.writable = writable
        # Rounded up so that there are few types of arrays; what is past the end is address space that nobody touches.
        length = round_block(nbytes)
        address = libc.map_shared(fd, 0, length) if writable else libc.map_read_only(fd, length)
        view = memoryview(libc.view_of(address, length)).cast("B")[:nbytes]
        #: All of it; the mapping lives as long as this, or anything made of it, does.
        self.view = view if writable else view.toreadonly()
        _known[token] = self

    def __reduce__(self) -> Any:
        return _attach, (reduction.DupFd(self.fd), self.nbytes, self.token, self.writable)


def _attach(passed: Any, nbytes: int, token: bytes, writable: bool) -> SharedBuffer:
    """The buffer of a received descriptor: the one this process has already, if it has."""
    fd = passed.detach()
    known = _known.get(token)
    if known is not None:
        os.close(fd)
        return known
    return SharedBuffer(fd, nbytes, token, writable)


def _pass(buffer: SharedBuffer, keep: Keep) -> Any:
    keep(buffer.fd, buffer)
    return _attach, (STAND_IN, buffer.nbytes, buffer.token, buffer.writable)


# In our own queues: beside the message, which needs no server and survives its sender.
pass_descriptor(SharedBuffer, _pass)


def new_data_buffer(fd: int, nbytes: int) -> SharedBuffer:
    """A buffer of data that everybody may write, over a memfd that it owns from now on."""
    return SharedBuffer(fd, nbytes, os.urandom(_TOKEN_BYTES), True)


def new_memfd(nbytes: int) -> int:
    """A memfd for shared data.

    Raises:
        TooManyDescriptors: this process has no descriptor left.
        ArenaFull: larger than `ulimit -f` lets a file be.
    """
    try:
        return make_memfd("torchcrew-share", nbytes)
    except OSError as error:
        raise _explain(error) from error


def _explain(error: OSError) -> OSError | ArenaFull:
    if error.errno == errno.EMFILE:
        return TooManyDescriptors()
    if error.errno == errno.EFBIG:
        return ArenaFull("the shared copy is larger than `ulimit -f` lets a file be; raise that limit")
    if error.errno in (errno.ENOSPC, errno.ENOMEM):
        return ArenaFull("the system has no memory left for the shared copy")
    return error


def write_range(fd: int, offset: int, address: int, nbytes: int) -> None:
    """Copy ``nbytes`` at ``address`` into the file.

    Written, not copied through a mapping: pages that are written whole need not be zeroed and faulted in first.

    Raises:
        ArenaFull: the system is out of memory.
    """
    done = 0
    while done < nbytes:
        size = min(_PIECE, nbytes - done)
        if size == _PIECE:
            piece: Any = (ctypes.c_char * _PIECE).from_address(address + done)
        else:
            piece = ctypes.string_at(address + done, size)
        try:
            done += os.pwrite(fd, piece, offset + done)
        except OSError as error:
            raise _explain(error) from error


class BufferWriter:
    """Writes a buffer from front to back; `seal` ends it, `close` gives it up."""

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._fd = new_memfd(0)
        self.position = 0

    def write(self, data: Any) -> int:
        """Append ``data`` (anything with bytes); returns where it begins.

        Raises:
            ArenaFull: over the budget, or the system is out of memory.
        """
        start, view = self.position, memoryview(data).cast("B")
        self._allowance.take(view.nbytes)
        done = 0
        while done < view.nbytes:
            try:
                done += os.write(self._fd, view[done:])
            except OSError as error:
                raise _explain(error) from error
        self.position += view.nbytes
        return start

    def write_aligned(self, data: Any) -> int:
        """Append ``data`` at a multiple of 8 bytes; returns where it begins."""
        self.write(bytes(-self.position % 8))
        return self.write(data)

    def seal(self) -> SharedBuffer:
        """End writing, for everybody and for good; returns the buffer."""
        with contextlib.suppress(OSError):  # where the kernel cannot: mapped for reading only, all the same
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        fd, self._fd = self._fd, -1
        return SharedBuffer(fd, self.position, os.urandom(_TOKEN_BYTES), False)

    def close(self) -> None:
        """Let go of what was not sealed; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
