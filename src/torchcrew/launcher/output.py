"""What the ranks write: lines on the user's screen, or a file for each rank.

    user's process                                       rank
    Output ── streams(rank) ─── inherited ─────────────► Streams.take(): descriptors 1 and 2
      read(fd) ◄──────────── a pipe for each stream ──── whatever it, its C code and its children write
        │                    (a folder: straight into the rank's file, nobody reads)
        └─► Screen ─► sys.stdout, sys.stderr

Owner      the user's process has the read ends, and the write ends until `started`; `close` closes what is left.
Waiting    a rank that is quicker than the user's screen waits in its write: the pipe is all the room there is.
           A screen that takes nothing (Ctrl-S, a pager) is asked again later; the loop goes on meanwhile.
Death      rank dies: what it wrote is in the pipe, an unfinished line included. Its children may hold the write ends
           for as long as they like: `drain` takes what is there and waits for nobody.
           user's process dies: the next write of a rank fails; its guardian ends it anyway.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import io
import os
import struct
import sys
import termios
from collections import deque
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from torchcrew.launcher.draft import STDERR, STDOUT, Draft, complete, plain, resolved
from torchcrew.launcher.screen import Screen

__all__ = ("Output", "Streams")

#: Bytes taken from a pipe at a time: other ranks and the rest of the loop have their turn in between.
CHUNK = 1 << 16
#: Wanted size of a pipe, and what all of a crew may have: past 64 MiB the kernel gives a user's new pipes a page each.
PIPE, PIPES = 1 << 20, 16 << 20
#: Lines, and characters of each, that are kept for the message about a failure.
TAIL, TAIL_WIDTH = 20, 500
#: Bytes at the end of a file in which these lines are looked for.
TAIL_BYTES = 1 << 16
#: Characters kept of a line whose end has not come.
TAIL_REST = 1 << 12


class Streams:
    """The write ends for one rank, on their way to it."""

    def __init__(self, out: int, err: int, output: Output | None) -> None:
        """Made by `Output.streams`.

        Args:
            out: descriptor for the rank's standard output.
            err: for its standard error; may be the same.
            output: whose descriptors a fork inherits.
        """
        self._out, self._err = out, err
        self._output = output

    def __reduce__(self) -> Any:
        # One descriptor twice is more than the starters of processes can pass on.
        err = None if self._err == self._out else reduction.DupFd(self._err)
        return _arrive, (reduction.DupFd(self._out), err)

    def take(self) -> None:
        """In the rank, before anything is written: its standard streams lead to the user's process or its file.

        Python's `sys.stdout` and `sys.stderr` are line buffered from here on, and made anew where the process has none,
        or has inherited an object of the user's process (a notebook's, pytest's) that nobody empties in this one.
        """
        out, err = _above_standard(self._out), _above_standard(self._err)
        os.dup2(out, 1)
        os.dup2(err, 2)
        for fd in {out, err, self._out, self._err} - {1, 2}:
            with contextlib.suppress(OSError):
                os.close(fd)
        inherited = self._output is not None
        if self._output is not None:
            self._output._abandon()
        for number, name in ((1, "stdout"), (2, "stderr")):
            _renew(name, number, inherited)


def _arrive(out: Any, err: Any) -> Streams:
    """Unpickle the streams, in the rank."""
    first = out.detach()
    return Streams(first, first if err is None else err.detach(), None)


def _above_standard(fd: int) -> int:
    """A descriptor for the same that is none of the three standard ones: these may be free in a daemon."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) if fd < 3 else fd


def _renew(name: str, number: int, inherited: bool) -> None:
    """Have `sys.stdout` or `sys.stderr` write to its descriptor, line by line."""
    stream = getattr(sys, name)
    own = isinstance(stream, io.TextIOWrapper) and not stream.closed and _number_of(stream) == number
    # What the program has put there in this very process is its own business: a tee writes to the descriptor as well.
    if stream is None or getattr(stream, "closed", False) or (inherited and not own):
        opened = open(number, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
        setattr(sys, name, opened)
        setattr(sys, f"__{name}__", opened)
        return
    for one in {id(stream): stream, id(original := getattr(sys, f"__{name}__")): original}.values():
        if isinstance(one, io.TextIOWrapper) and not one.closed and _number_of(one) == number:
            one.reconfigure(line_buffering=True)


def _number_of(stream: io.TextIOWrapper) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


class _Tail:
    """The last lines of a stream."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=TAIL)
        self._rest = ""

    def feed(self, text: str) -> None:
        *lines, rest = (self._rest + text).rsplit("\n", TAIL + 1)
        if len(lines) == TAIL + 1:
            del lines[0]  # many lines in one
        self._lines.extend(map(_tidy, lines))
        if len(rest) > TAIL_REST:
            rest = resolved(rest)[:TAIL_REST] + ("\r" if rest.endswith("\r") else "")
        self._rest = rest

    def lines(self) -> list[str]:
        rest = _tidy(self._rest)
        return [*self._lines, *([rest] if rest else [])][-TAIL:]


def _tidy(line: str) -> str:
    """A line for a message: its last state without colours, not too long."""
    line = plain(resolved(line.removesuffix("\r"))).rstrip()
    return line if len(line) <= TAIL_WIDTH else f"{line[: TAIL_WIDTH - 4]} ..."


class _Source:
    """The read end of one pipe, and what has come from it so far."""

    def __init__(self, draft: Draft, tail: _Tail | None) -> None:
        self.draft = draft
        self.tail = tail
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._carry = ""

    def text(self, data: bytes, final: bool = False) -> str:
        """The characters and escape sequences that are complete with these bytes."""
        text = self._carry + self._decoder.decode(data, final)
        ready = complete(text)
        self._carry = text[len(ready) :]
        return ready


class Output:
    """The output of all ranks of a crew, in the user's process. No thread: a loop polls `descriptors`."""

    def __init__(
        self, count: int, logs: str | os.PathLike[str] | None = None, first: int = 0, append: bool = False
    ) -> None:
        """Make it; a folder and its empty files at once.

        Args:
            count: of the ranks. Everything else here counts them from 0 on...
            first: ... but what the user sees, from this one on.
            append: keep what is in the files.
            logs: None for lines as they are, "prefix" for lines with the rank before them where there are several, or
                a folder in which each rank writes its own `rank0.log`, ...; files of these names are emptied.

        Raises:
            OSError: the folder or a file cannot be made.
        """
        self._count = count
        self._folder = None if logs is None or logs == "prefix" else Path(logs).absolute()
        self._prefixed = logs == "prefix" and (count > 1 or first > 0)
        self._first = first
        self._activity = 0
        self._screen = Screen(alone=count == 1)
        self._sources: dict[int, _Source] = {}
        self._write_ends: dict[int, set[int]] = {}
        self._tails = [_Tail() for _ in range(count)]
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            for rank in range(count):
                with self._file(rank).open("ab" if append else "wb"):
                    pass

    def streams(self, rank: int) -> Streams:
        """The streams of a rank that is about to start; call `started` when it has."""
        self.started(rank)
        if self._folder is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            out = err = _high(os.open(self._file(rank), flags, 0o666))
            self._write_ends[rank] = {out}
        else:
            out, err = self._pipe(rank, STDOUT), self._pipe(rank, STDERR)
        return Streams(out, err, self)

    def started(self, rank: int) -> None:
        """The rank has its streams, or will not start: close this process's copies of the write ends."""
        for fd in self._write_ends.pop(rank, ()):
            os.close(fd)

    def environment(self) -> dict[str, str]:
        """Variables by which a rank's progress bars know how wide the user's terminal is; none where there is none."""
        try:
            columns, lines = os.get_terminal_size(sys.stderr.fileno())
        except (AttributeError, OSError, ValueError):
            return {}
        if self._folder is not None or "COLUMNS" in os.environ or "LINES" in os.environ:
            return {}
        width = columns - len(self._prefix(0))
        return {"COLUMNS": str(width), "LINES": str(lines)} if width > 0 and lines > 0 else {}

    def descriptors(self) -> list[int]:
        """What to poll for reading now; not the pipes for which there is no room on the user's side."""
        return [] if self._screen.is_stuck() else list(self._sources)

    def read(self, fd: int) -> None:
        """Take what is there, at most `CHUNK` bytes, and write the lines that are whole now."""
        if not self._screen.is_stuck():
            self._read(fd, CHUNK)

    def deadline(self) -> float | None:
        """When, by `time.monotonic`, `tick` is to be called; None for not before something was read."""
        return self._screen.deadline()

    def tick(self) -> None:
        """Show unfinished lines that have waited long enough: bars, prompts."""
        self._screen.tick()
        if self._screen.is_stuck():
            self._activity += 1  # the ranks are held up by the user, who wants to read

    @property
    def activity(self) -> int:
        """A number that changes whenever a rank has written something."""
        if self._folder is None:
            return self._activity
        return sum(self._size(rank) for rank in range(self._count))

    def tail(self, rank: int) -> list[str]:
        """The last lines that a rank wrote to its standard error (or to its file), what is in the pipe included."""
        if self._folder is not None:
            return self._tail_of_file(rank)
        tail = self._tails[rank]
        for fd in [fd for fd, source in self._sources.items() if source.tail is tail]:
            self._take(fd)
        return tail.lines()

    def say(self, text: str) -> None:
        """Write lines of the crew's own to `sys.stderr`, between the ranks' lines."""
        self._screen.say(text)

    def drain(self, wait: bool = True) -> None:
        """Write everything that is in the pipes now; what the user's process writes next begins a line of its own.

        Args:
            wait: as `print` does, for a screen that takes nothing at the moment; else the rest is kept for later.
        """
        for fd in list(self._sources):
            self._take(fd)
        self._screen.end_lines()
        if wait:
            self._screen.flush()

    def close(self) -> None:
        """Close all descriptors of this process; what is in the pipes is lost. Idempotent."""
        self._abandon()
        self._screen.end_lines()
        self._screen.flush()

    def _abandon(self) -> None:
        """Close all descriptors without a word: in a forked rank, which has copies of them."""
        for rank in list(self._write_ends):
            for fd in self._write_ends.pop(rank):
                with contextlib.suppress(OSError):  # a rank has closed its own
                    os.close(fd)
        while self._sources:
            os.close(self._sources.popitem()[0])

    def _file(self, rank: int) -> Path:
        assert self._folder is not None
        return self._folder / f"rank{self._first + rank}.log"

    def _size(self, rank: int) -> int:
        try:
            return self._file(rank).stat().st_size
        except OSError:  # the user has moved it away
            return 0

    def _tail_of_file(self, rank: int) -> list[str]:
        tail = _Tail()
        with contextlib.suppress(OSError), self._file(rank).open("rb") as file:
            file.seek(max(0, self._size(rank) - TAIL_BYTES))
            tail.feed(file.read(TAIL_BYTES).decode("utf-8", "replace"))
        return tail.lines()

    def _prefix(self, rank: int) -> str:
        width = len(str(self._first + self._count - 1))
        return f"[{self._first + rank:{width}}] " if self._prefixed else ""

    def _pipe(self, rank: int, stream: int) -> int:
        """Make a pipe for a stream of a rank; returns the write end."""
        read_end, write_end = map(_high, os.pipe())
        self._write_ends.setdefault(rank, set()).add(write_end)  # at once: there may be no descriptor for the next
        os.set_blocking(read_end, False)
        size = PIPE
        while size * 2 * self._count > PIPES:
            size //= 2
        if size > 1 << 16:  # what they have anyway
            with contextlib.suppress(OSError):
                fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, size)
        draft = self._screen.draft(rank, stream, self._prefix(rank))
        self._sources[read_end] = _Source(draft, self._tails[rank] if stream == STDERR else None)
        return write_end

    def _take(self, fd: int) -> None:
        """Take all that is in a pipe at this moment; whoever writes on and on is not waited for."""
        left = _waiting(fd)
        while left > 0 and fd in self._sources:
            left -= self._read(fd, min(left, CHUNK)) or left
        self._read(fd, CHUNK)  # most of the time this is the end

    def _read(self, fd: int, most: int) -> int:
        """Take at most so many bytes from a pipe; returns how many there were."""
        source = self._sources.get(fd)
        if source is None:  # ended since it was polled
            return 0
        try:
            data = os.read(fd, most)
        except BlockingIOError:
            return 0
        text = source.text(data, final=not data)
        if source.tail is not None:
            source.tail.feed(text)
        self._activity += 1
        if not data:
            del self._sources[fd]
            os.close(fd)
        if text:
            self._screen.add(source.draft, text)
        if not data:
            self._screen.end(source.draft)
        return len(data)


def _high(fd: int) -> int:
    """The same descriptor under a number that is not a standard stream's."""
    high = _above_standard(fd)
    if high != fd:
        os.close(fd)
    return high


def _waiting(fd: int) -> int:
    """How many bytes are in a pipe."""
    return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4))[0])
