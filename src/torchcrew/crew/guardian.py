"""The guardian: when the user's process dies, by any signal, its workers and what they started die with it.

    user's process                                  guardian (exec'd, own session, ~8 MB)
    ┌──────────────────┐  "watch pid" + pidfd       ┌──────────────────────────────────┐
    │ watch / forget   │ ─────────────────────────► │ pidfd of the user's process      │
    └──────┬───────────┘  SEQPACKET, never answered │ pidfds of the workers            │
           │ starts                                 └───────┬──────────────────────────┘
    worker, leader of its own process group  ◄──────────────┘ user dead → SIGKILL to the group
           └─ its subprocesses, in the same group             user stopped → SIGSTOP, goes on → SIGCONT

Owner      the first `watch` of a process starts its guardian, without waiting for it: messages and pidfds wait in the
           socket, where they outlive the user's process. A forked child has none until it starts a worker itself.
Closing    nobody asks it to end: it ends when the user's process does, within milliseconds.
Death      user dies: see above; the pidfd is the only sign that counts. An end of file would be hidden by any stray
           fork that inherited the other end, and a thread in the worker by native code that holds the GIL.
           guardian dies: the next `watch` starts another and tells it of every living worker.
           worker dies: nothing, until `forget`.
"""

from __future__ import annotations

import array
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import process

from torchcrew.channel.sockets import QuietSocket, seqpacket_pair
from torchcrew.crew import stacks
from torchcrew.crew.guardian_main import IGNORED, MESSAGE, is_dead

__all__ = ("descriptors", "forget", "grace", "no_forks", "pid", "watch")

#: How long one message may wait for room, in seconds. A guardian takes milliseconds to start and never blocks, so one
#: that takes no message for so long was stopped by somebody, and is replaced.
SEND_TIMEOUT = 2.0
#: What the children of a process that is a child itself get to notice its death, of which
#: `multiprocessing.parent_process` tells them, before they are killed, in seconds. Those of the first process get none.
GRACE = 0.25


@dataclass
class _Link:
    """One running guardian as its user sees it: raw descriptors, which say nothing at interpreter exit."""

    pid: int
    pidfd: int
    control: QuietSocket

    def is_alive(self) -> bool:
        return not is_dead(self.pidfd)

    def send(self, kind: bytes, worker: int, pidfd: int | None = None) -> None:
        """Send one message.

        Raises:
            OSError: the guardian is gone, or took nothing for `SEND_TIMEOUT`.
        """
        deadline = time.monotonic() + SEND_TIMEOUT
        ancillary = [] if pidfd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [pidfd]))]
        # Not socket.send_fds, which drops the flags given to it.
        flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
        while True:
            try:
                self.control.sendmsg([MESSAGE.pack(kind, worker)], ancillary, flags)
                return
            except OSError as error:
                # No room for the message, or (ETOOMANYREFS) for one more descriptor in flight; both pass as soon as
                # the guardian reads.
                if isinstance(error, ConnectionError) or time.monotonic() > deadline:
                    raise
                time.sleep(0.002)

    def retire(self) -> None:
        """Make sure that this guardian is gone, and reaped."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # somebody's waitpid(-1) was faster
            os.waitpid(self.pid, 0)
        self.close()

    def close(self) -> None:
        self.control.close()
        os.close(self.pidfd)


@dataclass
class _Worker:
    """A watched process, and how often `watch` was called for it without `forget`."""

    pidfd: int
    times: int = 0


@dataclass
class _State:
    """What one process knows of its guardian and its workers."""

    owner: int
    link: _Link | None
    watched: dict[int, _Worker]  # by pid

    def find(self, worker: int) -> _Worker | None:
        """The entry of a process, made where there is none; None when that process is gone."""
        known = self.watched.get(worker)
        if known is not None and not is_dead(known.pidfd):
            return known
        try:
            pidfd = os.pidfd_open(worker)
        except ProcessLookupError:
            return known
        if known is not None:
            if is_dead(pidfd):  # still the same, not yet reaped
                os.close(pidfd)
                return known
            self.drop(worker)  # the number was used again
        self.watched[worker] = _Worker(pidfd)
        return self.watched[worker]

    def register(self, worker: int) -> None:
        """Tell the guardian of a worker; a fresh one is told of all that live."""
        link = self.link
        if link is not None and link.is_alive():
            try:
                link.send(b"W", worker, self.watched[worker].pidfd)
                return
            except OSError:
                pass
        if link is not None:
            self.link = None
            link.retire()
        self.link = link = _start()
        if not stacks.descriptors():
            stacks.offer("the user's process")  # who looks at its workers wants to see it, too
        for pid, known in self.watched.items():
            if not is_dead(known.pidfd):
                link.send(b"W", pid, known.pidfd)

    def drop(self, worker: int) -> None:
        os.close(self.watched.pop(worker).pidfd)

    def abandon(self) -> None:
        """Close what a forked child inherited; the guardian is its parent's."""
        for worker in list(self.watched):
            self.drop(worker)
        if self.link is not None:
            self.link.close()


# Reentrant: a signal handler may start a worker, or fork, while its thread is in here.
_lock = threading.RLock()
_state: _State | None = None


def watch(pid: int, *, own_group: bool = True) -> int | None:
    """Have the process ``pid`` and its process group killed when this process ends, however it ends.

    The worker shall be the leader of its own process group. It calls `os.setpgid(0, 0)` first of all, and this does the
    same from outside, so that whoever is faster does it. A worker that is already gone is not watched. Who watches one
    that is watched already shares it: it is forgotten when all have called `forget`.

    Args:
        pid: a process that this process has not reaped yet, or whose parent (the zygote) has not.
        own_group: False leaves the worker in the group where it is, such as this process's, whose Ctrl-C it then
            gets; it alone is killed then, without what it has started.

    Returns:
        A pidfd of it, to wait for its end: the guardian's own, which `forget` closes. None when it is already gone.

    Raises:
        OSError: no guardian could be started (no memory, no processes left); the worker is not watched then.
    """
    if own_group:
        with contextlib.suppress(OSError):  # not our child, has called exec, or is gone
            os.setpgid(pid, pid)
    with _lock:
        state = _own_state()
        worker = state.find(pid)
        if worker is None:
            return None
        try:
            state.register(pid)
        except BaseException:
            if worker.times == 0:
                state.drop(pid)
            raise
        worker.times += 1
        return worker.pidfd


def forget(pid: int) -> None:
    """Watch ``pid`` no longer: it ended and was reaped, or shall live on. An unknown one is ignored."""
    with _lock:
        state = _own_state()
        worker = state.watched.get(pid)
        if worker is None:
            return
        worker.times -= 1
        if worker.times > 0:
            return
        state.drop(pid)
        if state.link is not None:
            with contextlib.suppress(OSError):  # a dead one has forgotten everything
                state.link.send(b"F", pid)


def pid() -> int | None:
    """Pid of this process's guardian, or None while there is none."""
    with _lock:
        link = _own_state().link
        return link.pid if link is not None and link.is_alive() else None


def descriptors() -> tuple[int, ...]:
    """The raw descriptors that this process keeps open for its guardian: a control socket and a pidfd.

    Those of watched workers are not among them: they end with `forget`.
    """
    with _lock:
        link = _own_state().link
        return (link.control.fileno(), link.pidfd) if link is not None else ()


def grace() -> float:
    """How many seconds after this process's end its workers are killed."""
    return GRACE if process.parent_process() is not None else 0.0


def _own_state() -> _State:
    """Return this process's state; what a fork inherited is given up (C code can fork without Python's hooks)."""
    global _state
    if _state is not None and _state.owner != os.getpid():
        _after_fork_in_child()
    if _state is None:
        _state = _State(os.getpid(), None, {})
    return _state


_forking = threading.local()


def _before_fork() -> None:
    _lock.acquire()
    _forking.holds = True


def _after_fork_in_parent() -> None:
    # A fork in another thread may have begun before these hooks were registered, and end after.
    if getattr(_forking, "holds", False):
        _forking.holds = False
        _lock.release()


def _after_fork_in_child() -> None:
    global _lock, _state
    _lock = threading.RLock()
    state, _state = _state, None
    if state is not None:
        state.abandon()


# The lock is held over every fork, from the import on: a process that is forked while another thread executes a program
# inherits the pipe on which that thread waits for the program's start, and keeps it waiting for as long as it lives.
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


@contextlib.contextmanager
def no_forks() -> Iterator[None]:
    """Have other threads' forks wait; to be held while a program is executed."""
    with _lock:
        yield


def _start() -> _Link:
    """Start a guardian of this process; it need not be up when this returns."""
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "guardian_main.py")
    ours, theirs = seqpacket_pair()
    user = os.pidfd_open(os.getpid())
    # Blocked signals stay blocked over exec: there is no moment in which a Ctrl-C could end the new process.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        child = subprocess.Popen(
            [os.path.abspath(sys.executable), "-I", "-S", program, str(theirs.fileno()), str(user), str(grace())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",  # keeps no directory of the user's busy
            pass_fds=(theirs.fileno(), user),
            start_new_session=True,  # done before Popen returns: a signal to our process group does not reach it
        )
        child.returncode = 0  # we reap it; without this its finalizer complains that it still runs
        return _Link(child.pid, os.pidfd_open(child.pid), ours)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(user)
        theirs.close()
