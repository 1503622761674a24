"""The children of this process that failed and that nobody looked at; one line names them when it exits.

    Process.start ─► started()  a `Child`          │ exit code 0, or somebody looks: forgotten
    Popen.poll    ─► Child.ended(code)             │
    `exitcode` read, terminate, kill, an error     │ anything else: kept, and named on stderr by
      that an API raised ─► Child.dismiss()        ▼   the last finalizer of `multiprocessing`

`join` alone does not look: a program that starts, joins and goes on would otherwise exit with status 0 although every
child of it had died. A process names its own children only, so a grandchild is named once, by the child. Children that
still run when their parent exits are joined (daemons: terminated) by `multiprocessing` before.
"""

from __future__ import annotations

import collections
import os
import sys
from multiprocessing import process, util
from typing import Any

from torchcrew.channel.peers import Ended

__all__ = ("Child", "notice", "recent", "seen", "started")

#: Later than all that anybody else does at exit: `multiprocessing` runs negative ones after it has joined the children.
_LAST = -1000


class Child:
    """A started process, until it ends well or somebody looks at how it ended."""

    def __init__(self, name: str, pid: int) -> None:
        """``name`` is the process object's."""
        self.name = name
        self.pid = pid
        self.code: int | None = None

    def ended(self, code: int) -> None:
        """It was reaped; may be said any number of times."""
        self.code = code
        if code == 0:
            self.dismiss()

    def dismiss(self) -> None:
        """Somebody knows how it ended, or has ended it."""
        _children.pop(id(self), None)

    def __str__(self) -> str:
        return str(Ended(self.name, self.pid, self.code))


#: By identity, in the order of their starts.
_children: dict[int, Child] = {}
#: The last ones that were started, whatever became of them.
_recent: collections.deque[Child] = collections.deque(maxlen=256)
_registered_by = 0


def started(process_object: process.BaseProcess, pid: int) -> Child:
    """Return the record of a process that was just started."""
    global _registered_by
    if _registered_by != os.getpid():  # a forked child inherits neither children nor finalizers
        _registered_by = os.getpid()
        _children.clear()
        _recent.clear()
        util.Finalize(None, _print_notice, exitpriority=_LAST)
    child = Child(process_object.name, pid)
    _children[id(child)] = child
    _recent.append(child)
    return child


def recent(pid: int) -> Child | None:
    """The last process of this pid that was started here, unless that is long ago."""
    return next((child for child in reversed(list(_recent)) if child.pid == pid), None)


def seen(process_object: Any) -> None:
    """Take note that the user knows how this process ended, because an error says so. Any process object will do."""
    child = getattr(getattr(process_object, "_popen", None), "child", None)
    if child is not None:
        child.dismiss()


def notice() -> str:
    """The line about the children that have failed and were never looked at; "" where there are none."""
    failed = [child for child in list(_children.values()) if child.code] if _registered_by == os.getpid() else []
    if not failed:
        return ""
    what = "a child process" if len(failed) == 1 else f"{len(failed)} child processes"
    return f"torchcrew: {what} failed, and nothing looked at the exit code: {', '.join(map(str, failed))}"


def _print_notice() -> None:
    if getattr(sys, "last_type", None) is KeyboardInterrupt:  # the terminal's Ctrl-C went to the children, too
        return
    line = notice()
    if line and sys.stderr is not None:
        try:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # nobody is left to be told
            return
