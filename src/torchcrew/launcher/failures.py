"""What a rank sends of its exception, and the one error that the user's process raises for all that went wrong.

rank                                           user's process
  pack(error) ─► Report (pickle and text) ───►   first(...) of all failures ─► error(...)
                                                   the rank's exception, its cause a `RankFailed` that says the rest
"""

from __future__ import annotations

import io
import pickle
import signal
import socket
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torchcrew.crew.functions import Pickler
from torchcrew.crew.reports import Failure, Kind
from torchcrew.errors import RankDied, RankFailed

__all__ = ("End", "describe", "error", "is_consequence", "pack", "signal_name", "unpack")


@dataclass(frozen=True)
class End:
    """How a rank failed."""

    rank: int
    pid: int | None
    exitcode: int | None
    """None for one that has not ended by itself."""
    failure: Failure | None
    stderr: Sequence[str]
    remark: str = ""
    """What else there is to say."""


def is_consequence(end: End) -> bool:
    """Whether a rank only says that another one is gone."""
    return end.failure is not None and end.failure.kind is Kind.CONSEQUENCE


#: How deep exceptions in exceptions are taken apart.
_DEPTH = 8

# In the rank ----------------------------------------------------------------------------------------------------------


def pack(error: BaseException) -> bytes:
    """Pickle an exception such that it can be rebuilt as what it is; b"" where that is impossible.

    Many exceptions cannot be rebuilt as pickle tries it, by calling their class with their `args`; or are another one
    then. These are made without that call, and given their `args` and attributes.
    """
    for pickled in (error, _Parts(error)):
        try:
            data = _dumps(pickled)
            loaded = pickle.loads(data)
            if type(loaded) is type(error) and (pickled is not error or _text(loaded) == _text(error)):
                return data
        except Exception:
            continue
    return b""


def _text(error: BaseException) -> str | None:
    try:
        return str(error)
    except Exception:
        return None


class _Parts:
    """An exception that is rebuilt without its ``__init__``."""

    def __init__(self, error: BaseException, depth: int = 0) -> None:
        self.error = error
        self.depth = depth

    def __reduce__(self) -> Any:
        attributes = {name: self.part(value, None) for name, value in vars(self.error).items()}
        kept = {name: part for name, part in attributes.items() if part is not None}
        return _rebuild, (type(self.error), tuple(self.part(arg, repr(arg)) for arg in self.error.args), kept)

    def part(self, value: Any, otherwise: Any) -> Any:
        """A value as it can be pickled: exceptions, as those of a group, may be in parts themselves."""
        if _can_be_pickled(value):
            return value
        if self.depth < _DEPTH:
            if isinstance(value, BaseException):
                return _Parts(value, self.depth + 1)
            if type(value) in (list, tuple):
                return type(value)(self.part(item, repr(item)) for item in value)
        return otherwise


def _rebuild(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    builtin: Any = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    error: BaseException = builtin.__new__(kind, *args)  # the class's own may want something else
    error.args = args
    vars(error).update(attributes)
    return error


def _can_be_pickled(value: Any) -> bool:
    try:
        pickle.loads(_dumps(value))
    except Exception:
        return False
    return True


def _dumps(obj: Any) -> bytes:
    file = io.BytesIO()
    forking: Any = ForkingPickler
    Pickler(file, None, forking._copyreg_dispatch_table).dump(obj)  # tensors by value: the rank will be gone
    return file.getvalue()


# In the user's process ------------------------------------------------------------------------------------------------


def error(end: End) -> Exception:
    """The exception to raise for a failed rank."""
    if end.failure is None:
        how = " ".join(part for part in (_how_it_died(end), end.remark) if part)
        return _complete(RankDied(f"{_who(end)} {how}{_last_lines(end)}"), end)
    remark = f" {end.remark}" if end.remark else ""
    what = f"{_who(end)} raised an exception.{remark} There:\n\n{end.failure.text.rstrip()}\n{_last_lines(end)}"
    failed = _complete(RankFailed(what), end)
    original = unpack(end.failure.pickled)
    if original is None:
        return failed
    original.__cause__ = failed
    return original


def unpack(pickled: bytes) -> Exception | None:
    """What `pack` made; None where this process cannot rebuild it, or where it should not raise it."""
    try:
        original = pickle.loads(pickled)
    except Exception:  # there is none, or it is of a class that this process cannot import
        return None
    # One like KeyboardInterrupt would mean something else here.
    return original if isinstance(original, Exception) else None


def _complete(failed: RankFailed, end: End) -> RankFailed:
    failed.rank, failed.pid, failed.host = end.rank, end.pid, socket.gethostname()
    failed.exitcode = end.exitcode
    failed.signal = signal_name(end.exitcode)
    failed.stderr = tuple(end.stderr)
    return failed


def signal_name(exitcode: int | None) -> str | None:
    """The name of the signal that an exit code stands for; None where it stands for none."""
    if exitcode is None or exitcode >= 0:
        return None
    try:
        return signal.Signals(-exitcode).name
    except ValueError:
        return f"SIG{-exitcode}"


def _who(end: End) -> str:
    return f"rank {end.rank} (pid {end.pid} on {socket.gethostname()})"


#: What usually sends or causes a signal, for the person who has not sent it.
_SENDERS = {
    "SIGKILL": "If nobody sent it, it was the kernel, out of memory: smaller batches, fewer ranks or fewer workers "
    "need less.",
    "SIGSEGV": "Native code of a library crashed; `python -X faulthandler` shows where.",
    "SIGBUS": "Native code touched memory that is not there: a full /dev/shm, or a file that was truncated.",
    "SIGABRT": "Native code gave up; what it said is below.",
}


def _how_it_died(end: End) -> str:
    name = signal_name(end.exitcode)
    if name is not None:
        return f"was killed by {name}. {_SENDERS.get(name, '')}".rstrip()
    if end.exitcode == 0:
        return "ended with exit code 0 before its function had returned: something called os._exit or exec."
    if end.exitcode is None or end.exitcode == 255:
        return "ended; its exit code is not known."
    return f"ended with exit code {end.exitcode}."


def _last_lines(end: End) -> str:
    if not end.stderr:
        return ""
    return "\nThe last lines of its standard error:\n" + "\n".join(f"  | {line}" for line in end.stderr)


def describe(failed: BaseException) -> str:
    """One line of an exception, for a log."""
    return traceback.format_exception_only(type(failed), failed)[-1].strip()
