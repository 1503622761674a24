"""The line that a writer has not finished, and what a terminal makes of text with control characters."""

from __future__ import annotations

import re
import time
import unicodedata

__all__ = ("STDERR", "STDOUT", "Draft", "complete", "cut", "moves_cursor", "plain", "resolved")

STDOUT, STDERR = 0, 1

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-Z\\^-~])")
#: Escapes after which the cursor is on another row, or was: bars of several rows.
_MOVE = re.compile(r"\x1b(?:\[[0-9;]*[ABEFHJfsu]|[78M])")
#: The beginning of an escape sequence at the end of a text.
_INCOMPLETE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]{0,200}\x1b?|[ -/]*)\Z")
#: Where a prefix belongs in text that rewrites its row.
_START = re.compile(r"\r(?=[^\r\n])|\n(?!\Z)")


def plain(text: str) -> str:
    """Text without escape sequences."""
    return _ESCAPE.sub("", text) if "\x1b" in text else text


def complete(text: str) -> str:
    """Text without an escape sequence at its end of which more may come."""
    at = text.rfind("\x1b", -256) if "\x1b" in text else -1
    if at < 0:
        return text
    # The end of an OSC sequence is itself an escape of two characters.
    match = _INCOMPLETE.search(text, max(0, len(text) - 256))
    return text[: match.start()] if match else text


def moves_cursor(text: str) -> bool:
    """Whether the text goes to other rows, as bars of several rows do."""
    return "\x1b" in text and _MOVE.search(text) is not None


def resolved(line: str) -> str:
    """What a terminal shows of a line that was rewritten with carriage returns (nearly: colours are not merged)."""
    if "\r" not in line:
        return line
    shown = ""
    for text in line.split("\r"):
        if not plain(text):
            shown = "" if "K" in text else shown + text  # an erased row, or a change of colour
        elif "\x1b" in text or "\x1b" in shown:
            shown = text
        else:
            shown = text + shown[len(text) :]
    return shown


class Draft:
    """The line that one stream of one rank has not finished."""

    def __init__(self, rank: int, stream: int, prefix: str) -> None:
        """Begin an empty one.

        Args:
            rank: the lowest one's is shown.
            stream: `STDOUT` or `STDERR` of the user.
            prefix: comes before every line.
        """
        self.order = (rank, -stream)
        self.stream = stream
        self.prefix = prefix
        self.moves = False
        self.begin()

    def begin(self) -> None:
        """Begin the next line."""
        self.unseen_since: float | None = None
        self.returns = False
        self.fresh = True  # what is passed on next is the first of its row
        self.size = 0
        self._seen = ""
        self._unseen: list[str] = []

    def append(self, text: str) -> None:
        """Add text without a newline."""
        if self.unseen_since is None:
            self.unseen_since = time.monotonic()
        self.returns = self.returns or "\r" in text
        self._unseen.append(text)
        self.size += len(text)

    def unseen(self) -> str:
        """What has not been passed on to the screen."""
        return "".join(self._unseen)

    def line(self) -> str:
        """All of it."""
        return self._seen + self.unseen()

    def settle(self) -> str:
        """Keep its last state only, which is returned; nothing is unseen afterwards."""
        line = self.line()
        # The carriage return at the end says that the next text goes over this one.
        self._seen = resolved(line) + "\r" if self.returns and line.endswith("\r") else resolved(line)
        self._unseen = []
        self.size = len(self._seen)
        self.unseen_since = None
        return self._seen

    def shorten(self) -> None:
        """Keep its last state only, seen or not."""
        since = self.unseen_since
        self.settle()
        self.unseen_since = since

    def forget(self) -> None:
        """Drop what was passed on; the line goes on."""
        self._seen, self._unseen, self.size, self.unseen_since = "", [], 0, None

    def blank(self) -> bool:
        """Whether there is nothing to see."""
        return not plain(resolved(self.line())).strip()

    def marked(self, text: str) -> str:
        """Text to be passed on as it is, with the prefix wherever a row begins."""
        if self.prefix:
            begins = self.fresh and text[:1] != "\r"
            text = (self.prefix if begins else "") + _START.sub(lambda match: match[0] + self.prefix, text)
        self.fresh = text.endswith("\r")
        return text

    def whole(self, text: str) -> str:
        """Finished lines nothing of which is on the screen, in their last state, with prefixes."""
        if self.moves:
            self.fresh = True
            return self.marked(text)
        if not self.prefix and "\r" not in text:
            return text
        return "".join(f"{self.prefix}{_last_state(line)}\n" for line in text[:-1].split("\n"))


def _last_state(line: str) -> str:
    r"""A finished line without its "\n" as it was in the end; the "\r" of "\r\n" is no rewriting."""
    body = line.removesuffix("\r")
    return resolved(body) + line[len(body) :]


def cut(text: str, width: int) -> str:
    """As much of a text as fits into a row; escape sequences need no room."""
    used, done = 0, 0
    while done < len(text):
        escape = _ESCAPE.match(text, done)
        if escape:
            done = escape.end()
            continue
        used += _columns(text[done])
        if used > width:
            return text[:done] + ("\x1b[0m" if "\x1b" in text[:done] else "")
        done += 1
    return text


def _columns(character: str) -> int:
    """How many columns of a terminal a character takes, at most."""
    if character == "\t":
        return 8
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
