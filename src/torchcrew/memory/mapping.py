"""One memfd, mapped window by window when a block in it is first looked at.

A window is mapped once per process and stays until the last view of it is gone: a view holds its window (a ctypes array
over the mapping), so closing a `Mapping` never pulls memory from under a tensor.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from torchcrew.memory import libc

__all__ = ("WINDOW", "Mapping", "round_block")

#: Bytes of one window: large enough that a few hold any usual arena, small enough for `ulimit -v`.
WINDOW = 64 << 20
#: Blocks up to this size are rounded to pages, larger ones to an eighth of a power of two (`round_block`).
_FINE = 64 << 10

_view_types: dict[int, Any] = {}

# Mappings that are not closed. Without this, an owner that dies in a reference cycle would find its windows gone: the
# cyclic collector calls weak references' callbacks (which unmap) *before* the `__del__` that puts an arena back.
_open: set[Mapping] = set()


def round_block(nbytes: int) -> int:
    """Round up to a size that blocks may have: at most 1/8 more, so that there are few distinct sizes.

    ctypes makes one Python type per array length and keeps it for ever; the surplus is address space, not memory.
    """
    step = libc.PAGE if nbytes <= _FINE else max(libc.PAGE, 1 << (nbytes - 1).bit_length() - 4)
    return max(1, -(-nbytes // step)) * step


def _view_type(nbytes: int) -> Any:
    found = _view_types.get(nbytes)
    if found is None:
        found = _view_types[nbytes] = ctypes.c_char * nbytes
    return found


class Mapping:
    """The windows of one memfd that this process has looked at.

    Owner: the creator of this object; it owns ``fd``. `close` closes the descriptor at once and leaves each window to
    its views.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._windows: dict[tuple[int, int], Any] = {}
        _open.add(self)

    def view(self, offset: int, nbytes: int) -> Any:
        """A writable ctypes array over ``[offset, offset + nbytes)``; the memory is mapped as long as it lives.

        Raises:
            OSError: the address space is exhausted.
        """
        # A block that crosses a border gets a mapping of its own that covers both windows: mapping pages twice costs
        # address space only, and blocks are recycled, so it is the same mapping every time.
        key = (offset // WINDOW, (offset + nbytes - 1) // WINDOW)
        base = self._windows.get(key)
        if base is None:
            base = self._windows[key] = self._map(*key)
        return _view_type(nbytes).from_buffer(base, offset - key[0] * WINDOW)

    def _map(self, first: int, last: int) -> Any:
        nbytes = (last - first + 1) * WINDOW
        return libc.view_of(libc.map_shared(self.fd, first * WINDOW, nbytes), nbytes)

    def close(self) -> None:
        """Close the descriptor and forget the windows; views that exist stay valid."""
        fd, self.fd = self.fd, -1
        self._windows.clear()
        _open.discard(self)
        if fd >= 0:
            os.close(fd)


os.register_at_fork(after_in_child=_open.clear)
