"""`TaskTally`: how many tasks of a joinable queue are not done, in the control page of its mailbox.

    put ─► [ begin ─ send ─ done ]  under the mailbox's record lock          task_done ─► one less, under the same lock
                                                                             join ─► looks until it is 0

Death      of a producer between `begin` and `done`: it had sent its task, or not. The next one who takes the lock notes
           a doubt; a `task_done` too many is then taken for the task that was sent and not counted.
           of a consumer that had taken a task: that task is never done, as with stock; `wait` ends with `Deserted` when
           nobody else is left, and warns of each death before.
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING

from torchcrew.channel.holders import Deserted
from torchcrew.channel.mailbox import CONTROL_FREE, Mailbox

if TYPE_CHECKING:
    from ctypes import c_uint64

__all__ = ("TaskTally",)

#: How long a join sleeps between two looks, in seconds: it begins short, and grows.
_FIRST_NAP, _LONGEST_NAP = 50e-6, 5e-3


class TaskTally:
    """See the module. `begin`, `done` and `undo` are called with the mailbox's lock held."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._left = self._word(0)
        self._sending = self._word(1)
        self._doubts = self._word(2)

    def _word(self, index: int) -> c_uint64:
        return ctypes.c_uint64.from_buffer(self._mailbox.page, CONTROL_FREE + 8 * index)

    def begin(self) -> None:
        """A task is about to be sent."""
        self._settle()
        self._sending.value = 1

    def done(self) -> None:
        """It was sent."""
        self._left.value += 1
        self._sending.value = 0

    def undo(self) -> None:
        """It was not."""
        self._sending.value = 0

    def add(self) -> None:
        """Count a task that will be sent later."""
        with self._mailbox.putting, self._mailbox.record:
            self._settle()
            self._left.value += 1

    def task_done(self) -> None:
        """Count one less.

        Raises:
            ValueError: all were done.
        """
        with self._mailbox.putting, self._mailbox.record:
            self._settle()
            if self._left.value:
                self._left.value -= 1
            elif self._doubts.value:
                self._doubts.value -= 1
            else:
                raise ValueError("task_done() called too many times")

    def wait(self) -> None:
        """Wait until all are done.

        Raises:
            Deserted: nobody is left who could do them.
        """
        holders = self._mailbox.holders
        nap = _FIRST_NAP
        while self._left.value:
            if nap == _LONGEST_NAP:
                if not holders.deserted():
                    holders.tell()
                elif self._left.value:
                    raise Deserted
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)

    def _settle(self) -> None:
        if self._sending.value:
            self._sending.value = 0
            self._doubts.value += 1
