"""Looking at ranks that run: for progress, where there is a timeout, and for whoever asks by SIGQUIT."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from torchcrew.errors import RanksStuck
from torchcrew.launcher.ledger import Ledger

__all__ = ("Absence", "Progress", "asked")

#: How long ranks may take to start whatever ``timeout`` says, in seconds: torch may come from a cold network disk.
START_TIMEOUT = 180.0
#: How often it is looked, once a rank has returned, whether others wait for it, in seconds.
ABSENCE_EVERY = 0.5
#: For how long nothing must have happened before ranks that have returned are let go, in seconds.
SILENCE = 3.0
#: How often progress is looked for, in seconds.
LOOK_EVERY = 0.1


class Progress:
    """Looks for progress, where the user has set a timeout.

    Args:
        timeout: seconds without any; None: nobody looks.
        ticks: returns what changes with any progress.
        is_starting: whether some rank is not yet ready for its function.
        explain: says where every rank is.
    """

    def __init__(
        self,
        timeout: float | None,
        ticks: Callable[[], tuple[int, ...]],
        is_starting: Callable[[], bool],
        explain: Callable[[], str],
    ) -> None:
        self._timeout = timeout
        self._ticks, self._is_starting, self._explain = ticks, is_starting, explain
        self._last: tuple[int, ...] = ()
        self._since = self._looked = time.monotonic()

    def left(self) -> float | None:
        """Seconds until the next look; None: there will be none."""
        return None if self._timeout is None else min(LOOK_EVERY, self._timeout)

    def look(self) -> None:
        """Take note of progress.

        Raises:
            RanksStuck: there was none for too long.
        """
        now = time.monotonic()
        if self._timeout is None or now - self._looked < min(LOOK_EVERY, self._timeout) / 2:
            return
        self._looked = now
        ticks = self._ticks()
        if ticks != self._last:
            self._last, self._since = ticks, now
        elif now - self._since > (max(self._timeout, START_TIMEOUT) if self._is_starting() else self._timeout):
            where = self._explain()
            # Asking takes a moment, in which a late rank may have come; or it was asking that woke it.
            if self._ticks() == ticks:
                raise RanksStuck(f"no rank made any progress for {self._timeout:g} s: {where}")


class Absence:
    """Looks for ranks that wait for one which has returned, and so will not come.

    Where the ledger shows that a rank is in a collective which a returned one has not been in, this is certain. What it
    does not show (the gradients of a last batch that only some have, `Work.wait`) looks like ranks that do nothing:
    after `SILENCE` seconds those that have returned may as well end, as they would under stock's launchers. Who waits
    for them is then told by its connections.
    """

    def __init__(self, ledger: Ledger, count: int) -> None:
        self._ledger = ledger
        self._count = count
        self._looked = time.monotonic()
        self._last: tuple[int, ...] = ()
        self._silent_since = self._looked
        self._suspects: set[tuple[int, int]] = set()

    def look(self, returned: Mapping[int, bool]) -> tuple[set[tuple[int, int]], bool]:
        """Look, once in a while.

        Args:
            returned: the ranks that have, and whether nothing of them goes on in another thread.

        Returns:
            Pairs of a rank and one that it waits for in vain, and whether nothing has happened for `SILENCE`.
        """
        now = time.monotonic()
        if not returned or now - self._looked < ABSENCE_EVERY:
            return set(), False
        self._looked = now
        entries = {index: self._ledger.entry(index) for index in range(self._count) if index not in returned}
        ticks = tuple(entry.ticks for entry in entries.values())
        moved, self._last = ticks != self._last, ticks
        if moved:
            self._silent_since = now
        suspects = {
            (index, gone)
            for index, entry in entries.items()
            if (call := entry.call) is not None and call.sequence and call.generation and not call.group
            for gone, alone in returned.items()
            if alone and self._ledger.latest(gone, "", call.generation) < call.sequence
        }
        certain = set() if moved else suspects & self._suspects
        self._suspects = suspects
        return certain, now - self._silent_since > SILENCE


@contextlib.contextmanager
def asked() -> Iterator[int]:
    """An eventfd that SIGQUIT (Ctrl-backslash) makes readable; -1 where the program uses that signal itself."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGQUIT) is not signal.SIG_DFL
    ):
        yield -1
        return
    event = os.eventfd(0)
    # The handler may run in the middle of anything: it only wakes the loop.
    signal.signal(signal.SIGQUIT, lambda *_: os.eventfd_write(event, 1))
    try:
        yield event
    finally:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        os.close(event)
