"""Python stacks of other processes: each of ours offers its own, and anybody of the same user may ask.

    who asks                                               a process that offers
      /proc/PID/fd: which one is `torchcrew-stacks`? ────► memfd: head (pid, user, label)
      flock: one who asks at a time
      empty it behind the head; for each thread:
        SIGNAL ──────────────────────────────────────────► faulthandler's handler, in C: needs no interpreter's lock
        read, when it has left the handler ◄══════════════ its own stack, behind the head (O_APPEND)

Threads    each writes its own stack. A handler that writes those of all threads reads frames of threads that run, and
           that kills the process: one time in 400, where Python threads are busy. Even its own stack is not whole for
           some nanoseconds of a call from C to Python (CPython 3.11), so a thread that runs is asked when it rests;
           only if it never does so within `_PATIENCE`, all the same.
Owner      of the memfd: the process that offers; one descriptor, until its end. A forked child gets one of its own, in
           the place of the one it inherited; a new program (exec) has none, and is not sent the signal.
Death      of who asks: its lock goes with it, and the next one empties what was written for it.
           of who is asked: seen by its pidfd.
Waiting    all are asked at once, with one deadline. A process that is stopped is left so, and sent nothing.

The signal interrupts what a thread waits in, as any would: Python and gloo then go on waiting, while `sleep` of libc
returns early to native code.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
from multiprocessing import process

from torchcrew.crew.stack_asking import HEAD, LINK, MAGIC, NAME, SIGNAL, TEXT, ask, exists
from torchcrew.crew.stack_programs import Processes, members
from torchcrew.memory.arena import make_memfd

__all__ = ("SIGNAL", "Processes", "ask", "descriptors", "exists", "members", "offer")

_offered = -1
_offered_by = 0
_label = ""
_user = 0


def offer(label: str, user: int | None = None) -> None:
    """Let others of the same user ask this process for its stacks; a second call changes the label, and the user.

    Never raises: a process that has no descriptor left, or no /proc, is just not asked.

    Args:
        label: what this process is, in a word or two.
        user: pid of the process that this one works for; if None, as before, or its `multiprocessing.parent_process`.
    """
    global _offered, _offered_by
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        if _offered_by == os.getpid():
            _write_head(_offered, label, user)
            return
        fd = make_memfd(NAME, TEXT)
        try:
            _write_head(fd, label, user)
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
            faulthandler.register(SIGNAL, file=fd, all_threads=False, chain=False)
        except BaseException:
            os.close(fd)
            raise
        if not _offered_by:
            os.register_at_fork(after_in_child=_renew)
        _offered, _offered_by = fd, os.getpid()


def descriptors() -> tuple[int, ...]:
    """The descriptor that this process keeps open for it, if it offers."""
    return (_offered,) if _offered_by == os.getpid() else ()


def _renew() -> None:
    """In a forked child: have a memfd of its own under the number that faulthandler knows, or none."""
    global _offered, _offered_by
    inherited, _offered, parent = _offered, -1, _offered_by
    if not parent or inherited < 0:
        return
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/self/fd/{inherited}") != LINK:
            faulthandler.unregister(SIGNAL)  # somebody has closed it; the number is another file's now
            return
        try:
            fd = make_memfd(NAME, TEXT)
            try:
                _write_head(fd, f"forked by {_label}", os.getppid())
                fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
                os.dup2(fd, inherited, inheritable=False)
            finally:
                os.close(fd)
        except OSError:
            faulthandler.unregister(SIGNAL)
            os.close(inherited)
            return
        _offered, _offered_by = inherited, os.getpid()


def _write_head(fd: int, label: str, user: int | None) -> None:
    global _label, _user
    if user is None and _offered_by == os.getpid():
        user = _user
    elif user is None:
        parent = process.parent_process()
        user = 0 if parent is None else parent.pid or 0
    _label, _user = label, user
    text = label.encode(errors="replace")[: TEXT - HEAD.size]
    # By an open file of its own: what is written to one with O_APPEND goes to its end, wherever it should go.
    place = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(place, HEAD.pack(MAGIC, os.getpid(), user, len(text)) + text, 0)
    finally:
        os.close(place)
