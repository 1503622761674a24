"""What ranks raise, return and do in `test_failures.py`."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

import torchcrew
from tests.launcher import failure_cases as cases
from torchcrew.testing import procfs


class ManyArguments(Exception):
    """Pickle would call its class with the one text that `args` has."""

    def __init__(self, path: str, line: int, *, why: str) -> None:
        super().__init__(f"{path}:{line}: {why}")
        self.path, self.line, self.why = path, line, why


class Formatted(Exception):
    """Would be another one when its class is called with its `args`."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no {name}")


class WithLock(Exception):
    """Has what cannot be pickled, and what can."""

    def __init__(self, number: int) -> None:
        super().__init__(f"number {number}", number)
        self.number = number
        self.lock = threading.Lock()


class LockAsArgument(Exception):
    """Has it among its `args`."""

    def __init__(self) -> None:
        super().__init__("a lock", threading.Lock())


class PickyNew(Exception):
    """Cannot be made without two arguments."""

    def __new__(cls, first: int, second: int) -> PickyNew:
        return super().__new__(cls, first, second)

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class BadReduce(Exception):
    """Says itself how to be pickled, and fails."""

    def __reduce__(self) -> NoReturn:
        raise RuntimeError("not this one")


class BadText(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class OwnBase(BaseException):
    """Is no `Exception`."""


def _local() -> Exception:
    class Local(ValueError):
        def __init__(self, what: str, number: int) -> None:
            super().__init__(what)
            self.number = number

    return Local("of a class local to a function", 3)


def _from(call: Callable[[], Any]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError


def _with_notes() -> Exception:
    error = ValueError("with notes")
    for note in ("the first", "the second"):
        if hasattr(error, "add_note"):
            error.add_note(note)
    return error


def _with_tensor() -> Exception:
    error = ValueError("with a tensor")
    error.tensor = torch.arange(100_000)  # type: ignore[attr-defined]
    return error


def _in_a_circle() -> Exception:
    error = ValueError("refers to itself")
    error.me = error  # type: ignore[attr-defined]
    return error


#: Exceptions that must arrive as what they are: type, text and args.
AS_THEY_ARE = MappingProxyType(
    {
        "many arguments": lambda: ManyArguments("a.py", 3, why="it is odd"),
        "formatted": lambda: Formatted("data"),
        "with a lock": lambda: WithLock(7),
        "picky __new__": lambda: PickyNew(1, 2),
        "bad __reduce__": lambda: BadReduce("text"),
        "local class": _local,
        "notes": _with_notes,
        "tensor": _with_tensor,
        "circle": _in_a_circle,
        "key": lambda: _from(lambda: {}["missing"]),  # type: ignore[index]
        "unicode": lambda: _from(lambda: b"\xff".decode()),
        "json": lambda: _from(lambda: json.loads("{")),
        "file": lambda: _from(lambda: os.open("/nonexistent/file", os.O_RDONLY)),
        "module": lambda: _from(lambda: __import__("nonexistent_module")),
        "syntax": lambda: _from(lambda: compile("a b", "file.py", "exec")),
        "sqlite": lambda: _from(lambda: sqlite3.connect(":memory:").execute("nonsense")),
        "struct": lambda: _from(lambda: struct.pack("i", "x")),
        "zlib": lambda: _from(lambda: zlib.decompress(b"x")),
        "numpy": lambda: _from(lambda: np.linalg.inv(np.zeros((2, 2)))),
        "torch linalg": lambda: _from(lambda: torch.linalg.inv(torch.zeros(2, 2))),
        "torch": lambda: _from(lambda: torch.ones(2) + torch.ones(3)),
        "torch memory": lambda: torch.cuda.OutOfMemoryError("CUDA out of memory"),
        "stop": lambda: StopIteration(5),
        "subprocess": lambda: subprocess.CalledProcessError(3, ["false"], b"out", b"err"),
        "timeout": lambda: asyncio.TimeoutError(),
        "empty": lambda: ValueError(),
        "huge": lambda: ValueError("x" * 10_000_000),
        "surrogates": lambda: ValueError("\udcff and \0"),
        "memory": lambda: MemoryError("full"),
        "connection": lambda: ConnectionResetError("of the user's own"),
    }
)
#: Exceptions of which only the text can be told: raised as `RankFailed`.
AS_TEXT = MappingProxyType(
    {
        "keyboard": lambda: KeyboardInterrupt(),
        "own base": lambda: OwnBase("is no Exception"),
        "cancelled": lambda: asyncio.CancelledError("cancelled"),
        "generator": lambda: GeneratorExit(),
    }
)


def raise_one(name: str) -> NoReturn:
    """Raise one of the table, in rank 1."""
    if torchcrew.rank() == 0:
        time.sleep(cases.FOR_EVER)
    raise {**AS_THEY_ARE, **AS_TEXT}[name]()


def raise_chain() -> NoReturn:
    """Raise one that has a cause."""
    try:
        raise KeyError("the cause")
    except KeyError as error:
        raise ValueError("the effect") from error


def raise_bad_text() -> NoReturn:
    """Raise one whose text cannot be told."""
    raise BadText("unseen")


def raise_lock_argument() -> NoReturn:
    """Raise one whose `args` cannot be pickled."""
    raise LockAsArgument


def raise_both() -> NoReturn:
    """Raise in all ranks at the same moment."""
    dist.barrier()
    raise RuntimeError(f"this is rank {torchcrew.rank()}")


def raise_one_after_the_other() -> NoReturn:
    """Raise in rank 1, then in rank 0, before anybody was ended."""
    dist.barrier()
    if torchcrew.rank() == 0:
        os.kill(os.getppid(), 0)
        time.sleep(0.02)
    raise RuntimeError(f"this is rank {torchcrew.rank()}")


def exit_with(code: Any) -> None:
    """End by `sys.exit`."""
    print("out before the exit", file=sys.stderr, flush=True)  # noqa: T201
    sys.exit(code)


def kill_self(signum: int) -> None:
    """End by a signal, in rank 1."""
    if torchcrew.rank() == 1:
        os.kill(os.getpid(), signum)
    time.sleep(cases.FOR_EVER)


def return_lock() -> Any:
    """Return what cannot be pickled."""
    return threading.Lock()


class Unloadable:
    """Pickles well, and cannot be unpickled."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        return _load, (self.how,)


def _load(how: str) -> None:
    if how == "raises":
        raise cases.Broken("while loading", 1)
    os._exit(cases.EXIT_CODE)


def nothing(*_: Any) -> None:
    """Do nothing."""


def fail_until(folder: str, times: int) -> int:
    """Fail so often; the number of the attempt then."""
    if torchcrew.rank() == 0:
        attempt = len(os.listdir(folder))
        assert os.environ["TORCHELASTIC_RESTART_COUNT"] == str(attempt)
        Path(folder, str(attempt)).touch()
        if attempt < times:
            raise cases.Broken("attempt", attempt)
    dist.barrier()
    return len(os.listdir(folder))


# What a rank does that others end, or that closes ---------------------------------------------------------------------


def _ignoring_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _stopped() -> None:
    threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGSTOP)).start()


def _with_thread() -> None:
    threading.Thread(target=time.sleep, args=(cases.FOR_EVER,)).start()


def _with_exit_handler() -> None:
    atexit.register(time.sleep, cases.FOR_EVER)


def _with_fork() -> None:
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(cases.FOR_EVER)
        os._exit(0)


def _printing() -> None:
    def write() -> None:
        while True:
            os.write(1, b"x" * 5000 + b"\n")

    threading.Thread(target=write, daemon=True).start()


#: Ranks that do not end easily.
OBSTINATE = MappingProxyType(
    {
        "ignores SIGTERM": _ignoring_sigterm,
        "stopped": _stopped,
        "thread": _with_thread,
        "exit handler": _with_exit_handler,
        "fork": _with_fork,
        "prints": _printing,
    }
)


def be_obstinate(folder: str, kind: str, how: str) -> None:
    """Rank 0 is so while rank 1 fails; "self": the obstinate one fails itself."""
    own = torchcrew.rank() == (1 if how == "self" else 0)
    if own:
        OBSTINATE[kind]()
        if kind == "stopped":
            time.sleep(0.2)  # goes on never, or as the test's next process
    cases.note_processes(folder)
    if torchcrew.rank() == 0:
        time.sleep(cases.FOR_EVER)
    if kind == "stopped":
        time.sleep(0.1)
    else:
        cases.wait_for(folder, "rank 0")
    cases.fail(folder, "raises" if how == "self" else how)


def stay_obstinate(folder: str, kind: str) -> int:
    """Return, and be obstinate afterwards."""
    if torchcrew.rank() == 0:
        OBSTINATE[kind]()
    own = procfs.read_process(os.getpid())
    assert own is not None
    return own.pid
