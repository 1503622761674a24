"""What runs in the children of the fault table: ways to end, and objects that end the process that pickles them."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import MappingProxyType
from typing import Any

from torchcrew.testing.crash import EXIT_CODE, die

#: Ways to end, and the exit code that a process has afterwards.
ENDS = MappingProxyType(
    {
        "exit": EXIT_CODE,
        "C exit": EXIT_CODE,
        "SIGSEGV": -signal.SIGSEGV,
        "SIGKILL": -signal.SIGKILL,
        "exception": 1,
    }
)

#: Whether a trap springs in this process: a sibling that receives one passes it on.
_armed = False


def end(how: str) -> None:
    """End this process in one of the ways in `ENDS`."""
    if how == "exit":
        sys.exit(EXIT_CODE)
    die({"C exit": "exit"}.get(how, how.lower()))


class Trap:
    """Ends the process that pickles it (`at` is "pickled"), or the armed one that unpickles it ("unpickled")."""

    def __init__(self, how: str, at: str) -> None:
        self.how, self.at = how, at

    def __reduce__(self) -> tuple[Any, ...]:
        if self.at == "pickled":
            end(self.how)
        return _arrive, (self.how, self.at)


class ProcessTrap(Trap):
    """Ends whatever process unpickles it: for the arguments of a process or a task, which have one reader."""

    def __reduce__(self) -> tuple[Any, ...]:
        return end, (self.how,)


def _arrive(how: str, at: str) -> Trap:
    if _armed:
        end(how)
    return Trap(how, at)


def nothing(*_: object) -> None:
    """A target that returns."""


def end_soon(how: str, *_: object) -> None:
    """A target that ends while the parent waits, holding what it was given."""
    time.sleep(0.05)
    end(how)


def identity(value: Any) -> Any:
    """A task that returns what it got."""
    return value


def trap_as_result(how: str) -> Trap:
    """A task whose result cannot be sent."""
    return Trap(how, "pickled")


def echo(inbox: Any, outbox: Any) -> None:
    """Send everything back until None comes; what is meant for the victim goes back to where it was."""
    while (item := inbox.get()) is not None:
        if isinstance(item, Trap):
            inbox.put(item)
            time.sleep(0.01)
        else:
            outbox.put(item)


def end_in_put(how: str, inbox: Any, outbox: Any) -> None:
    """End, or go on after an error, in the middle of a put."""
    inbox.put(Trap(how, "pickled"))
    outbox.put("after")


def end_in_get(how: str, inbox: Any, outbox: Any) -> None:
    """End in the middle of the get that brings a trap; a number that comes instead goes where it belongs."""
    global _armed
    _armed = True
    while True:
        outbox.put(inbox.get())


def end_when_idle(how: str, inbox: Any, outbox: Any) -> None:
    """End on SIGUSR1, blocked in get."""
    end_on_signal(how)
    outbox.put("ready")
    while True:
        outbox.put(inbox.get())


def end_on_signal(how: str) -> None:
    """Arrange that SIGUSR1 ends this process in the given way."""
    signal.signal(signal.SIGUSR1, lambda *_: end(how))


def tell(pid: int) -> None:
    """Have a process that called `end_on_signal` end; one that did not yet ends by the signal itself."""
    os.kill(pid, signal.SIGUSR1)
