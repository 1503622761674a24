"""What a rank says of its own failure, and which of several failures came first.

    parent                                   rank
    Report (memfd) ── inherited ───────────► arm(): whatever ends loading writes it
      read() ◄═══════ the same memfd ═══════ write(): moment, kind, traceback

Owner      the parent makes one for each rank and closes it with the last reference to it; no name anywhere.
Death      a rank killed in the middle of writing has written nothing: the head comes last.
           parent dies: the kernel frees the memory with the rank.
"""

from __future__ import annotations

import contextlib
import enum
import os
import pickle
import struct
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import reduction
from types import TracebackType
from typing import Any

from torchcrew.crew import hints
from torchcrew.memory import libc

__all__ = ("Failure", "Kind", "Report", "first", "loaded", "of_file", "says_peer_is_gone")


class Kind(enum.IntEnum):
    """What a failure is, in the order in which they are believed to be the cause when several come at once."""

    OWN = 0
    """The function raised an exception."""
    LOADING = 1
    """The function or its arguments could not be unpickled."""
    CONSEQUENCE = 2
    """The function raised an exception that says a peer is gone, or does not come; whoever that was failed before."""


_HEAD = struct.Struct("<qqqq")  # moment, kind, lengths of the text and of the pickle

#: Types and texts of exceptions by which a rank learns that another one is gone.
_GONE_TYPES = (ConnectionError, EOFError)
_GONE_NAMES = frozenset(
    {"DistBackendError", "DistNetworkError", "DistStoreError", "PeerDied", "CollectiveTimeout", "BrokenBarrierError"}
)
_GONE_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
    "gloo/transport",
    "remote process exited",
    # Of a future, or of a group that has met it before.
    "PeerDied: ",
    "CollectiveTimeout: ",
)


@dataclass(frozen=True)
class Failure:
    """What a rank wrote."""

    moment: int
    """`time.monotonic_ns`, which is the same clock in all processes of a machine."""
    kind: Kind
    text: str
    pickled: bytes = b""
    """The exception itself, where its rank has sent it."""


class Report:
    """Room for one rank's last words."""

    def __init__(self) -> None:
        """Make it, empty."""
        self.fd = os.memfd_create("torchcrew-report")
        self._close = weakref.finalize(self, os.close, self.fd)
        self._close.atexit = False  # the kernel does it then

    def __reduce__(self) -> Any:
        return _arrive, (reduction.DupFd(self.fd),)

    def read(self) -> Failure | None:
        """What the rank wrote; None when it wrote nothing, or not all."""
        head = os.pread(self.fd, _HEAD.size, 0)
        if len(head) < _HEAD.size or not any(head):
            return None
        moment, kind, length, pickled = _HEAD.unpack(head)
        text = os.pread(self.fd, length, _HEAD.size)
        return Failure(
            moment, Kind(kind), text.decode("utf-8", "surrogatepass"), os.pread(self.fd, pickled, _HEAD.size + length)
        )

    def write(
        self, error: BaseException, kind: Kind | None = None, pickled: bytes = b"", moment: int | None = None
    ) -> None:
        """Write, as a rank, what it failed with, and when (now); ``pickled`` goes along as it is."""
        moment = time.monotonic_ns() if moment is None else moment
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        hint = ""
        with contextlib.suppress(Exception):  # an exception whose text is an error
            hint = hints.explain(error)
        if hint:
            text += f"\n{hint}\n"
        if kind is None:
            kind = Kind.CONSEQUENCE if says_peer_is_gone(error) else Kind.OWN
        data = text.encode("utf-8", "surrogatepass")
        libc.write_all(self.fd, data + pickled, _HEAD.size)
        os.pwrite(self.fd, _HEAD.pack(moment, kind, len(data), len(pickled)), 0)

    def close(self) -> None:
        """Free it. Done by itself with the last reference, too."""
        self._close()


def _arrive(duplicate: Any) -> Report:
    """Unpickle a report, in the rank; from here on an exception that ends this process is written to it."""
    report = Report.__new__(Report)
    report.fd = duplicate.detach()
    os.set_inheritable(report.fd, False)  # a descriptor arrives without
    report._close = weakref.finalize(report, os.close, report.fd)
    report._close.atexit = False
    sys.excepthook = _Hook(report, sys.excepthook)
    return report


class _Hook:
    """`sys.excepthook` while a rank loads its function and arguments."""

    def __init__(self, report: Report, before: Callable[..., Any]) -> None:
        self.report = report
        self.before = before

    def __call__(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if isinstance(error, Exception):
            with contextlib.suppress(Exception):
                self.report.write(error, Kind.LOADING)
        self.before(kind, error, where)


def loaded() -> None:
    """The rank has its function and arguments: its exceptions are its own business again."""
    hook = sys.excepthook
    if isinstance(hook, _Hook):
        sys.excepthook = hook.before


def of_file(path: str) -> Failure | None:
    """What stands in a file as stock's ranks write them: contexts may be made by others, of their own processes."""
    if not os.access(path, os.R_OK):
        return None
    with open(path, "rb") as file:
        return Failure(0, Kind.OWN, pickle.load(file))


def says_peer_is_gone(error: BaseException) -> bool:
    """Whether an exception, or one that it came from, is how a rank learns of another one's end."""
    seen: set[int] = set()
    this: BaseException | None = error
    while this is not None and id(this) not in seen:
        seen.add(id(this))
        if isinstance(this, _GONE_TYPES) or type(this).__name__ in _GONE_NAMES:
            return True
        with contextlib.suppress(Exception):  # it may have no text
            if isinstance(this, (RuntimeError, OSError)) and any(words in str(this) for words in _GONE_TEXTS):
                return True
        this = this.__cause__ or (None if this.__suppress_context__ else this.__context__)
    return False


def first(failures: dict[int, Failure | None], killed: set[int]) -> int:
    """The rank that failed first, as far as can be told.

    Args:
        failures: by rank, in the order in which their ends were seen; None for one that ended without a word.
        killed: those of them that a signal ended.

    Returns:
        Its number: not one that only says that a peer is gone, if there is another; one ended by a signal, whose moment
        nobody knows, before one that raised, and that before one that chose its exit code; else the earliest.
    """

    def rank_of(item: tuple[int, Failure | None]) -> tuple[int, int, int]:
        index, failure = item
        if failure is None:
            return (0, 0 if index in killed else 2, 0)
        return (int(failure.kind is Kind.CONSEQUENCE), 1, failure.moment)

    return min(failures.items(), key=rank_of)[0]
