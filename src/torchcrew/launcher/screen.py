"""The user's screen: whole lines of many writers above at most one unfinished line, a progress bar most of the time.

    draft of rank 0's stderr ─┐                      ┌► sys.stdout ─┐  a row each, or one row where both are
    draft of rank 0's stdout ─┼─► Screen.add, tick ──┤              ├─ the same terminal or file
    draft of rank 1's stderr ─┘                      └► sys.stderr ─┘

Terminal   the unfinished line is drawn by us, cut to the width, erased before a line of somebody else and drawn again.
Elsewhere  what a bar writes is passed on as it is, and a new line is begun before a line of somebody else. Unfinished
           lines that are no bars wait for their ends there: nobody looks, and they cannot be erased.
Several    the lowest rank's unfinished line is shown; the others wait for their turn or their ends.
Finished   lines that were rewritten with carriage returns before anybody saw them appear in their last state.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import time
from collections import deque
from typing import Any

from torchcrew.launcher.draft import STDERR, STDOUT, Draft, cut, moves_cursor

__all__ = ("Row", "Screen")

#: How long an unfinished line waits for its end before it is shown, in seconds: most come in two reads by chance.
PATIENCE = 0.05
#: Characters of an unfinished line from which a bar is kept in its last state only.
KEPT = 1 << 16
#: Characters from which an unfinished line is shown piece by piece: a bound for memory.
LONGEST = 1 << 20

#: Bytes that a pipe takes at once if it takes any.
ATOMIC = 4096
#: How long a user's side that takes nothing is left alone, at first and at most, in seconds.
PAUSE, LONGEST_PAUSE = 0.001, 0.05

_ERASE_ROW, _ERASE_BELOW = "\r\x1b[K", "\r\x1b[J"


class Row:
    """The row of a terminal or a file where the cursor is."""

    def __init__(self, terminal: bool) -> None:
        self.terminal = terminal
        self.holder: Draft | None = None  # whose unfinished line is there
        self.live = False  # drawn by us, so that it can be erased and drawn again


class Screen:
    """`sys.stdout` and `sys.stderr` of the user's process, whatever these are at the moment.

    Text for one that is None, closed or broken is dropped. No method raises, except what a signal handler raises.
    """

    def __init__(self, alone: bool) -> None:
        """Make it.

        Args:
            alone: one rank speaks, so that an unfinished line is in nobody's way.
        """
        self._alone = alone
        self._drafts: list[Draft] = []
        self._own = Draft(-1, STDERR, "")
        self._users: tuple[Any, Any] = (None, None)
        self._rows = (Row(False), Row(False))
        self._queue: deque[tuple[int, str]] = deque()
        self._pause = PAUSE

    def draft(self, rank: int, stream: int, prefix: str) -> Draft:
        """A new writer's; arguments as for `Draft`."""
        draft = Draft(rank, stream, prefix)
        self._drafts.append(draft)
        return draft

    def add(self, draft: Draft, text: str) -> None:
        """Write what a writer has written: complete characters and escape sequences, incomplete lines."""
        draft.moves = draft.moves or moves_cursor(text)
        lines, newline, rest = text.rpartition("\n")
        if newline:
            self._finish(draft, lines + newline)
        if rest:
            draft.append(rest)
            if draft.size > KEPT:
                self._relieve(draft)
        self._send()

    def say(self, text: str) -> None:
        """Write lines of this process's own on `sys.stderr`."""
        self._finish(self._own, text.removesuffix("\n") + "\n")
        self._send()

    def end(self, draft: Draft) -> None:
        """The writer is gone: its unfinished line is all there will be."""
        self._end_line(draft)
        self._drafts.remove(draft)
        self._send()

    def end_lines(self) -> None:
        """Finish everybody's lines: what comes next on the screen begins a line of its own."""
        for draft in self._drafts:
            self._end_line(draft)
            draft.moves = False
        self._send()

    def deadline(self) -> float | None:
        """When, by `time.monotonic`, `tick` has something to do; None for not before more is written."""
        if self._queue:
            return time.monotonic() + self._pause
        times = [draft.unseen_since for draft in self._drafts if self._may_show(draft)]
        return min((since + PATIENCE for since in times if since is not None), default=None)

    def tick(self) -> None:
        """Show the unfinished line that has waited for long enough."""
        self._send()
        if self._queue:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            return
        now = time.monotonic()
        for draft in sorted(self._drafts, key=lambda draft: draft.order):
            if draft.unseen_since is not None and draft.unseen_since + PATIENCE <= now and self._may_show(draft):
                self._show(draft)
        self._send()

    def is_stuck(self) -> bool:
        """Whether the user's side takes no text at the moment: then nothing more should be added."""
        return bool(self._queue)

    def flush(self) -> None:
        """Write all that was added; waits, as `print` does, for as long as the user's side takes."""
        self._send(wait=True)

    def _row(self, draft: Draft) -> Row:
        """Where a draft is to be seen. Who replaces `sys.stdout` begins a row."""
        users = (sys.stdout, sys.stderr)
        if users[STDOUT] is not self._users[STDOUT] or users[STDERR] is not self._users[STDERR]:
            self._send(wait=True)  # for those who were there before
            self._users = users
            out = Row(_is_terminal(users[STDOUT]))
            self._rows = (out, out if _is_one_device(*users) else Row(_is_terminal(users[STDERR])))
        return self._rows[draft.stream]

    def _finish(self, draft: Draft, text: str) -> None:
        """Write lines: the first one ends the draft."""
        row = self._row(draft)
        if row.holder is draft and not row.live:
            self._put(draft.stream, draft.marked(draft.unseen() + text))
            row.holder = None
            draft.begin()
            return
        lines = draft.whole(draft.line() + text)
        drawn = row.holder if row.live else None
        self._clear(row)
        draft.begin()
        self._put(draft.stream, lines)
        if drawn is not None and drawn is not draft:
            self._draw(row, drawn)

    def _end_line(self, draft: Draft) -> None:
        row = self._row(draft)
        if row.holder is draft or draft.unseen_since is not None:
            if not draft.blank() or (row.holder is draft and not row.live):
                self._finish(draft, "\n")
            elif row.holder is draft:
                self._clear(row)
        draft.begin()

    def _relieve(self, draft: Draft) -> None:
        """Keep a long unfinished line from growing."""
        row = self._row(draft)
        passes_on = row.holder is draft and not row.live
        if draft.returns and not draft.moves and not passes_on:
            draft.shorten()
        if passes_on or draft.size > LONGEST:
            self._pass_on(row, draft)

    def _may_show(self, draft: Draft) -> bool:
        """Whether a draft has something new, and the right to show it."""
        if draft.unseen_since is None:
            return False
        row = self._row(draft)
        if row.holder is draft:
            return True
        if row.holder is not None and row.holder.order < draft.order and not row.holder.blank():
            return False
        return (row.terminal or self._alone or draft.returns or draft.moves) and not draft.blank()

    def _show(self, draft: Draft) -> None:
        row = self._row(draft)
        passes_on = row.holder is draft and not row.live
        if not row.terminal or draft.moves or passes_on:
            self._pass_on(row, draft)
        elif draft.blank():  # a bar that has erased itself
            self._clear(row)
            draft.settle()
        else:
            if row.holder is not draft:
                self._clear(row)
            self._draw(row, draft)

    def _draw(self, row: Row, draft: Draft) -> None:
        """Draw a draft on a terminal, on an empty row or over itself."""
        erase = _ERASE_ROW if row.holder is draft else ""
        self._put(draft.stream, erase + cut(draft.prefix + draft.settle(), self._width(draft.stream)))
        row.holder, row.live = draft, True

    def _pass_on(self, row: Row, draft: Draft) -> None:
        """Write what is new of a draft as it is; all of its last state on a row that was not its own."""
        if row.holder is draft and not row.live:
            text = draft.unseen()
        else:
            self._clear(row)
            draft.fresh = True
            text = draft.line() if draft.moves else draft.settle()
        self._put(draft.stream, draft.marked(text))
        row.holder, row.live = draft, False
        if draft.moves or draft.size > LONGEST:
            draft.forget()
        else:
            draft.settle()

    def _clear(self, row: Row) -> None:
        """Have the cursor at the beginning of an empty row."""
        holder, row.holder = row.holder, None
        if holder is None:
            return
        if row.live:
            self._put(holder.stream, _ERASE_ROW)
            holder.unseen_since = time.monotonic()  # it has its turn again
        elif row.terminal and holder.moves:
            self._put(holder.stream, _ERASE_BELOW)  # the writer draws all of its rows again
        else:
            self._put(holder.stream, "\n")
        holder.fresh = True
        row.live = False

    def _put(self, stream: int, text: str) -> None:
        """Have text written, after all that was put before: both streams may lead to the same terminal."""
        if self._queue and self._queue[-1][0] == stream and len(self._queue[-1][1]) < ATOMIC:
            text = self._queue.pop()[1] + text
        self._queue.append((stream, text))

    def _send(self, wait: bool = False) -> None:
        """Write what is queued, as far as the user's side takes it at once."""
        while self._queue:
            stream, text = self._queue[0]
            users = self._users[stream]
            if not wait and not _is_ready(users):
                return
            size = len(text)
            if isinstance(users, io.TextIOWrapper) and not wait:
                size = ATOMIC if text.isascii() else ATOMIC // 4
            self._queue.popleft()
            if size < len(text):
                self._queue.appendleft((stream, text[size:]))
            _write(users, text[:size])
        self._pause = PAUSE

    def _width(self, stream: int) -> int:
        """Columns that do not make a terminal begin another row."""
        with contextlib.suppress(Exception):
            columns = os.get_terminal_size(self._users[stream].fileno()).columns
            return (columns or 80) - 1
        return 79


def _write(users: Any, text: str) -> None:
    """Give text to the user's object. It may be of any class and raise anything: no rank must fail for it."""
    with contextlib.suppress(Exception):
        try:
            users.write(text)
        except UnicodeEncodeError:
            users.write(text.encode(users.encoding, "backslashreplace").decode(users.encoding))
    with contextlib.suppress(Exception):
        users.flush()


def _is_ready(users: Any) -> bool:
    """Whether a write of `ATOMIC` bytes will not wait; it would for a terminal stopped by Ctrl-S, and for a pager."""
    # Objects of other classes that have a descriptor may well write elsewhere, as a notebook's do.
    if not isinstance(users, io.TextIOWrapper):
        return True
    try:
        poll = select.poll()
        poll.register(users.fileno(), select.POLLOUT)
        return bool(poll.poll(0))
    except (OSError, ValueError):
        return True


def _is_terminal(users: Any) -> bool:
    """Whether a row of a user's stream can be erased."""
    try:
        return bool(users.isatty()) and os.environ.get("TERM") != "dumb"
    except Exception:  # None, closed, or anything
        return False


def _is_one_device(out: Any, err: Any) -> bool:
    """Whether text of both streams comes out in the same place."""
    if out is err or (_is_terminal(out) and _is_terminal(err)):
        return True
    try:
        return os.path.samestat(os.fstat(out.fileno()), os.fstat(err.fileno()))
    except Exception:
        return False
