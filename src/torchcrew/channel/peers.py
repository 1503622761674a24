"""How processes ended that this process had started: for the messages of those who waited for them in vain."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from multiprocessing import process
from typing import Any, NamedTuple

__all__ = ("Ended", "describe", "how_it_ended", "remember_with", "signal_name")

#: A process lets go of its descriptors a moment before its exit code is to be had: so many seconds at most.
_MOMENT = 0.5
_NAP = 2e-3

#: Ask for the name and exit code of a pid whose process object may be gone; None for an unknown one.
_memories: list[Callable[[int], Ended | None]] = []


class Ended(NamedTuple):
    """A process that is gone."""

    name: str
    pid: int
    code: int | None
    """Its exit code, negative for a signal; None where it is not known."""
    process: Any = None
    """Its process object, if there still is one."""

    @property
    def failed(self) -> bool:
        """Whether it did not end well, as far as is known."""
        return bool(self.code)

    def __str__(self) -> str:
        who = f"{self.name} (pid {self.pid}" if self.pid else f"({self.name}"
        if self.code is None:
            return who + ")"
        if self.code >= 0:
            return f"{who}, exit code {self.code})"
        return f"{who}, killed by {signal_name(-self.code)})"


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def remember_with(memory: Callable[[int], Ended | None]) -> None:
    """Ask ``memory``, too, about processes whose objects are gone."""
    _memories.append(memory)


def how_it_ended(pid: int) -> Ended:
    """What is known of a process of this pid, which this process has started and which has just ended."""
    if pid:
        for obj in list(process._dangling):  # type: ignore[attr-defined]
            popen = getattr(obj, "_popen", None)
            if getattr(popen, "pid", None) == pid and obj._parent_pid == os.getpid():
                return Ended(obj.name, pid, _exit_code(popen), obj)
        for memory in _memories:
            ended = memory(pid)
            if ended is not None:
                return ended
    return Ended("a process", pid, None)


def _exit_code(popen: Any) -> int | None:
    end = time.monotonic() + _MOMENT
    while True:
        code: int | None = popen.poll()
        if code is not None or time.monotonic() > end:
            return code
        time.sleep(_NAP)


def describe(pids: Iterable[int]) -> str:
    """The processes of these pids with how they ended, in a sentence's words."""
    return ", ".join(str(how_it_ended(pid)) for pid in dict.fromkeys(pids))
