"""The table of failures: what the peers do, how a rank fails, and the functions that the ranks run.

A cell of the table is a job of two ranks that share a folder of notes with whoever looks on:

    rank 0: the peer                      rank 1: the victim                    the test
      note "rank 0": its processes          note "rank 1"                         order(...), if asked to
      blocks                                waits for "rank 0", then the delay    reads the notes
                                            note "failed": the instant; fails     looks for what still lives
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.data

import torchcrew
import torchcrew.data
from torchcrew.testing import procfs
from torchcrew.testing.procfs import ProcessInfo

VICTIM = 1
#: Long beside every deadline here.
FOR_EVER = 100
TEXT = "broken on purpose"
LAST_WORDS = "last words of the victim"
EXIT_CODE = 7
#: How long a note may be in coming, in seconds.
NOTE_TIMEOUT = 30.0


class Broken(Exception):
    """What the victim raises: of a class that must arrive as what it is, with what it has."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what} (code {code})")
        self.what, self.code = what, code


# Notes ----------------------------------------------------------------------------------------------------------------


def note(folder: str | Path, name: str, value: Any) -> None:
    """Leave a note, whole or not at all."""
    path = Path(folder, f"{name}.json")
    hidden = path.with_suffix(f".{os.getpid()}")
    hidden.write_text(json.dumps(value))
    hidden.rename(path)


def read(folder: str | Path, name: str) -> Any:
    """Read a note; None while there is none."""
    try:
        return json.loads(Path(folder, f"{name}.json").read_text())
    except FileNotFoundError:
        return None


def wait_for(folder: str | Path, name: str, within: float = NOTE_TIMEOUT) -> Any:
    """Read a note that is to come."""
    deadline = time.monotonic() + within
    while (value := read(folder, name)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no note {name!r} in {folder} after {within:g} s")
        time.sleep(0.002)
    return value


def note_processes(folder: str | Path) -> None:
    """Note this rank's process, and all below it."""
    own = procfs.read_process(os.getpid())
    assert own is not None
    found = [own, *procfs.descendants(os.getpid())]
    note(folder, f"rank {torchcrew.rank()}", [(info.pid, info.started) for info in found])


def processes(folder: str | Path) -> set[ProcessInfo]:
    """What both ranks have noted."""
    return {ProcessInfo(*pair) for rank in (0, 1) for pair in wait_for(folder, f"rank {rank}")}


def rank_pid(folder: str | Path, rank: int) -> int:
    """The process of a rank, as it has noted it."""
    return int(wait_for(folder, f"rank {rank}")[0][0])


# What the peers do ----------------------------------------------------------------------------------------------------


class Sleepy(torch.utils.data.Dataset[int]):
    """Samples that never come."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        time.sleep(FOR_EVER)
        return index


def _in_collective(noted: Callable[[], None]) -> None:
    noted()
    dist.all_reduce(torch.ones(10))


def _in_recv(noted: Callable[[], None]) -> None:
    noted()
    dist.recv(torch.ones(10), src=VICTIM)


def _in_sleep(noted: Callable[[], None]) -> None:
    noted()
    time.sleep(FOR_EVER)


def _holding_the_gil(noted: Callable[[], None]) -> None:
    noted()
    ctypes.PyDLL(None).sleep(FOR_EVER)


def _in_loader(noted: Callable[[], None], method: str = "fork") -> None:
    iterator = iter(torchcrew.data.DataLoader(Sleepy(), num_workers=2, multiprocessing_context=method))
    noted()
    next(iterator)


def _in_zygote_loader(noted: Callable[[], None]) -> None:
    _in_loader(noted, "zygote")


def _in_stock_loader(noted: Callable[[], None]) -> None:
    iterator = iter(torch.utils.data.DataLoader(Sleepy(), num_workers=2, multiprocessing_context="fork"))
    noted()
    next(iterator)


def _in_subprocess(noted: Callable[[], None]) -> None:
    def note_when_started() -> None:
        while not any(info.command.startswith("sleep") for info in procfs.descendants(os.getpid())):
            time.sleep(0.002)
        noted()

    threading.Thread(target=note_when_started, daemon=True).start()
    subprocess.run(["sleep", str(FOR_EVER)], check=False)


PEERS = MappingProxyType(
    {
        "collective": _in_collective,
        "recv": _in_recv,
        "sleep": _in_sleep,
        "GIL": _holding_the_gil,
        "loader": _in_loader,
        "stock loader": _in_stock_loader,
        "subprocess": _in_subprocess,
        "zygote loader": _in_zygote_loader,
    }
)
#: Starts a zygote for its workers, which takes seconds.
SLOW_PEERS = ("zygote loader",)
FAST_PEERS = tuple(name for name in PEERS if name not in SLOW_PEERS)

# How the victim fails -------------------------------------------------------------------------------------------------


def _raise() -> None:
    raise Broken(TEXT, 42)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


#: How a rank fails by itself.
FAILURES = MappingProxyType(
    {"raises": _raise, "SIGKILL": _kill, "SIGSEGV": lambda: ctypes.string_at(0), "_exit": lambda: os._exit(EXIT_CODE)}
)
#: The exit codes of those that are no exceptions.
EXIT_CODES = MappingProxyType({"SIGKILL": -signal.SIGKILL, "SIGSEGV": -signal.SIGSEGV, "_exit": EXIT_CODE})


def fail(folder: str | Path, how: str) -> None:
    """Fail, having noted when."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    sys.stderr.write(f"{LAST_WORDS}\n")
    note(folder, "failed", time.monotonic())
    FAILURES[how]()


def take_part(folder: str, peer: str, how: str | None, delay: float = 0.0) -> None:
    """Be a rank of one cell of the table.

    Args:
        folder: for the notes.
        peer: what rank 0 does, of `PEERS`.
        how: in which way of `FAILURES` rank 1 fails; None: as the note "order" says, when there is one.
        delay: seconds from the moment when rank 0 is about to block.
    """
    if torchcrew.rank() != VICTIM:
        PEERS[peer](lambda: note_processes(folder))
        return
    note_processes(folder)
    wait_for(folder, "rank 0")
    time.sleep(delay)
    fail(folder, how or wait_for(folder, "order", FOR_EVER))


def add_up(seconds: float = 0.0) -> int:
    """A job that goes well: the sum of all ranks' numbers, from 1 on."""
    number = torch.tensor([torchcrew.rank() + 1])
    time.sleep(seconds)
    dist.all_reduce(number)
    return int(number)
