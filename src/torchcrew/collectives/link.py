"""Gloo between hosts, as groups across hosts use it: bytes, sums, and headers that say in words what is called.

Owner      of gloo's groups: this module, while a thread of theirs could still need the interpreter's lock to let go of
           an operation: their destructor waits for that thread, and whoever holds the lock then waits for ever.
Death      of a rank: its connections end, and every operation with it fails at once; if its host is cut off, when the
           time is over. Gloo's group is of no use then, and stays where it is until the process ends.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import ReduceOp

from torchcrew.collectives.lane import end_all
from torchcrew.errors import CollectiveTimeout, PeerDied

__all__ = ("HEADER", "Link", "header", "text_of")

#: Bytes of a header: as many from every rank, whatever it calls.
HEADER = 256

#: Gloo's groups that are in use, or have failed, and the last ones that are not. See `keep_groups_for_ever` of
#: `crew.rendezvous`: one that has seen others come and go has no operation left, and can be let go of.
_groups: set[Any] = set()
_idle: collections.deque[Any] = collections.deque(maxlen=8)
for _kept in (_groups, _idle):  # also when the interpreter ends, and clears its modules
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))

#: Seconds between two looks of a thread at what it waits for: for the first millisecond, and then.
_SOON, _LATER = 0.0001, 0.001
#: Held by a thread while it is in gloo; for ever once the interpreter ends.
_calling = threading.Lock()
_is_ending = threading.Event()


def _done(call: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Start an operation of gloo and wait until it is done.

    The interpreter that ends stops other threads where they ask for its lock; in the middle of gloo's `wait` that
    would be in C++, and abort the process. So they look, and sleep in Python; `_end` sees to it that none is looking.
    """
    if threading.current_thread() is threading.main_thread():
        call(*args, **options).wait()
        return
    with _calling:
        work = call(*args, **options)
    looks = 0
    while not _is_ending.wait(_SOON if looks < _LATER // _SOON else _LATER):
        looks += 1
        with _calling:
            if work.is_completed():
                work.wait()
                return
    raise RuntimeError("the interpreter ends")


@atexit.register
def _end() -> None:
    end_all()  # registered before this, it would be called behind it
    _is_ending.set()
    _calling.acquire()


class Link:
    """Gloo among some ranks, for bytes and sums; every call is made by all of them.

    Args:
        store: where they meet; nobody else uses the same keys.
        index: of this process among them.
        count: how many.
        timeout: to meet, and of messages.
    """

    def __init__(self, store: Any, index: int, count: int, timeout: timedelta) -> None:
        gloo: Any = distributed.ProcessGroupGloo
        self.group = gloo(store, index, count, timeout=timeout)
        self.count = count
        self.failed = False
        self._timeout = timeout
        self._is_waiting = False
        self._last: Any = None
        _groups.add(self.group)

    def close(self) -> None:
        """Use it no more."""
        if not self.failed and not self._is_waiting and self.group in _groups:
            _groups.discard(self.group)
            _idle.append(self.group)

    def _wait(self, deadline: float, call: Callable[..., Any], *args: Any) -> None:
        """Start an operation of gloo, and wait until it is done.

        Raises:
            PeerDied: a rank of another host is gone.
            CollectiveTimeout: not all have come in time.
        """
        left = deadline - time.monotonic()
        self._is_waiting = True
        try:
            _done(call, *args, timeout=timedelta(seconds=max(left, 0.001)))
        except RuntimeError as error:
            self.failed = True
            told = str(error).partition("] ")[2].partition(" This is ")[0] or str(error)  # between its line and advice
            if time.monotonic() >= deadline or "imed out" in told or "timeout" in told:
                raise CollectiveTimeout(f"not all hosts came to a collective in time: {told}") from error
            raise PeerDied(f"a rank on another host has ended, or cannot be reached: {told}") from error
        self._is_waiting = False

    def all_gather(self, outs: Sequence[torch.Tensor], row: torch.Tensor, deadline: float) -> None:
        """Copy the bytes of each into one of ``outs``, all of one size."""
        if row.numel():
            self._wait(deadline, self.group.allgather, list(outs), row)

    def broadcast(self, row: torch.Tensor, root: int, deadline: float) -> None:
        """Copy the bytes of ``root`` into the others'."""
        if row.numel():
            self._wait(deadline, self.group.broadcast, row, root)

    def add(self, row: torch.Tensor, deadline: float) -> None:
        """Add all tensors up, in place."""
        self._wait(deadline, self.group.allreduce, row, ReduceOp.SUM)

    def all_to_all(
        self, out: torch.Tensor, outs: Sequence[int], row: torch.Tensor, rows: Sequence[int], deadline: float
    ) -> None:
        """Send the parts of ``row``, of so many bytes each, one to each; ``out`` has theirs."""
        self._wait(deadline, self.group.alltoall_base, out, row, list(outs), list(rows))

    def leave_word(self, text: str) -> None:
        """Give a header to those who will ask for one, without waiting for them."""
        self.failed = True
        row = header(text)
        outs = [torch.empty_like(row) for _ in range(self.count)]
        with contextlib.suppress(RuntimeError):
            self._last = self.group.allgather(outs, row, timeout=self._timeout)


def header(text: str) -> torch.Tensor:
    """A text as a row of bytes of fixed size."""
    return torch.frombuffer(bytearray(text.encode()[:HEADER].ljust(HEADER)), dtype=torch.uint8)


def text_of(row: torch.Tensor) -> str:
    """The text of a header."""
    return bytes(row.tolist()).decode(errors="replace").strip()
