"""The stacks of a process: what `faulthandler` writes of its threads, read back."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ("Frame", "Stacks", "Thread", "frames_of", "printable")


@dataclass(frozen=True)
class Frame:
    """One call on a stack."""

    file: str
    line: int
    """0 where it is not known."""
    function: str
    """Its name alone, without that of its class."""


@dataclass(frozen=True)
class Thread:
    """One thread that runs Python."""

    tid: int
    """The kernel's number of it."""
    name: str
    """Empty where it has no other than the process."""
    is_main: bool
    frames: tuple[Frame, ...]
    """The innermost call first."""


@dataclass(frozen=True)
class Stacks:
    """What one process answered."""

    pid: int
    label: str = ""
    """What it is: "rank 1", "loader worker 0"; empty for one that offers no stacks."""
    state: str = ""
    """What its main thread did when it was asked: "runs", "sleeps", ..."""
    threads: tuple[Thread, ...] = ()
    """Its main thread first."""
    problem: str = ""
    """Why there are no threads, to be read after a name: "is stopped (...)"."""
    user: int = 0
    """Pid of the process that it works for; 0 where it is not known."""

    @property
    def main(self) -> tuple[Frame, ...]:
        """The frames of the main thread; of the first one where it has no Python frame."""
        return self.threads[0].frames if self.threads else ()


_FRAME_LINE = re.compile(r'  File (?:"(.*)"|\?\?\?), line (\d+|\?\?\?) in (.*)')
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U(00[0-9a-f]{6})")


def frames_of(text: str) -> tuple[Frame, ...]:
    """Read what faulthandler wrote of one thread; of several answers the last one counts.

    What is no frame, or only the beginning of one, is left out.
    """
    frames: list[Frame] = []
    for line in text.splitlines():
        if line.endswith("(most recent call first):"):
            frames = []
        elif (frame := _FRAME_LINE.fullmatch(line)) is not None:
            number = 0 if frame[2] == "???" else int(frame[2])
            frames.append(Frame(_unescaped(frame[1] or "???"), number, _unescaped(frame[3])))
    return tuple(frames)


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(_character, text)


def _character(match: re.Match[str]) -> str:
    number = int(match[match.lastindex or 1], 16)
    return chr(number) if number < 0x110000 else match[0]


def printable(text: str) -> str:
    """A text of another process, for a terminal: what is no printable character is written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
