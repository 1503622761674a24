"""Asking processes for their stacks; `stacks.py` has the picture."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass

from torchcrew.crew.guardian_main import is_dead
from torchcrew.crew.stack_text import Stacks, Thread, frames_of

__all__ = (
    "HEAD",
    "LINK",
    "MAGIC",
    "NAME",
    "SIGNAL",
    "TEXT",
    "ask",
    "exists",
    "numbers_in",
    "owner_of",
    "stat_of",
    "user_of",
)

SIGNAL = signal.SIGRTMAX - 7
"""The signal that asks: far from both ends, where C libraries, debuggers and service managers take theirs."""

NAME = "torchcrew-stacks"
LINK = f"/memfd:{NAME} (deleted)"
MAGIC = b"tcstack1"
HEAD = struct.Struct("<8siiH")  # magic, pid, user's pid, bytes of the label
_BIT = 1 << (SIGNAL - 1)
#: Where faulthandler's text begins; the label ends before.
TEXT = 256

#: First and longest pause between two looks at those that were asked, in seconds: a thread needs some 0.1 ms.
_PAUSE, _LONGEST_PAUSE = 0.0003, 0.01
#: Looks at a thread that has written nothing, and has nothing before it, until it is taken for a native one.
_LOOKS = 3
#: How long a thread that runs is looked at, in seconds, until it is asked all the same: one that spins in native code,
#: with the interpreter's lock, never rests. At most a third of the time that there is.
_PATIENCE = 0.15
#: Threads of a process that are asked.
_MOST_THREADS = 256

_libc = ctypes.CDLL(None, use_errno=True)

_STATES = {"R": "runs", "S": "sleeps", "D": "sleeps in the kernel", "T": "is stopped", "t": "is stopped", "I": "idles"}
_STOPPED = "is stopped (SIGSTOP, Ctrl-Z or a debugger)"
_ENDED = "has ended"
_UNINTERRUPTIBLE = "sleeps in the kernel and cannot be interrupted"
_STRANGER = "was not started by torchcrew, and offers no stacks"


def ask(pids: Iterable[int], timeout: float = 1.0) -> list[Stacks]:
    """Ask processes for their stacks, all at once.

    None is harmed: one that does not offer its stacks, or is stopped, gets no signal, and `Stacks.problem` says so.

    Args:
        pids: whom to ask.
        timeout: how long to wait for all of them, in seconds.

    Returns:
        For each its answer, in the same order.
    """
    deadline = time.monotonic() + timeout
    questions = [_Question(pid, min(_PATIENCE, timeout / 3)) for pid in pids]
    pause = _PAUSE
    try:
        while True:
            is_over = time.monotonic() >= deadline
            done = sum(question.done for question in questions)
            if not [question for question in questions if question.answer is None and not question.step(is_over)]:
                return [question.answer for question in questions if question.answer is not None]
            pause = min(2 * pause, _LONGEST_PAUSE) if done == sum(question.done for question in questions) else _PAUSE
            time.sleep(pause)
    finally:
        for question in questions:
            question.close()


class _Question:
    """One process that is being asked."""

    def __init__(self, pid: int, patience: float = _PATIENCE) -> None:
        self.pid = pid
        self.answer: Stacks | None = None
        self.state = ""
        self._head = _Head()
        self._memfd = self._pidfd = -1
        self._threads: list[Thread] = []
        self._to_ask: list[int] | None = None
        self._asking = 0
        self._begin = 0
        self._looks = 0
        self._is_blocked = False
        self._patient_until = time.monotonic() + patience
        self.done = 0
        """Grows while there is progress."""
        try:
            self._pidfd = os.pidfd_open(pid)  # from now on the number cannot come to mean another process unnoticed
        except OSError:
            self._end(_ENDED)

    def step(self, is_over: bool) -> bool:
        """Go on as far as it goes without waiting; whether there is an answer now, as there is when time is over."""
        try:
            self._step()
        except (FileNotFoundError, ProcessLookupError):
            self._end(_ENDED)
        except OSError as error:
            self._end(f"could not be asked ({error.strerror})")
        if self.answer is None and is_over:
            self._end(self._why_not())
        return self.answer is not None

    def _step(self) -> None:
        if self._to_ask is not None:
            self._go_on()
            return
        letter, uid = _state(self.pid), owner_of(self.pid)
        self.state = _STATES.get(letter, "")
        if letter in "ZX":
            self._end(_ENDED)
        elif uid not in (os.geteuid(), None) and os.geteuid() != 0:
            self._end("belongs to another user")
        elif self._memfd < 0 and not self._find():
            self._end(_STRANGER)
        elif letter in "Tt":
            self._end(_STOPPED)
        elif self._lock():
            self._begin_with_main()

    def _find(self) -> bool:
        found = _find(self.pid)
        if found is not None:
            self._memfd, self._head = found
        return found is not None

    def _lock(self) -> bool:
        try:
            fcntl.flock(self._memfd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _begin_with_main(self) -> None:
        """Ask the main thread, if it is sure that it catches the signal."""
        masks = _masks(self.pid, self.pid)
        self._is_blocked = bool(masks.get("SigBlk", 0) & _BIT)
        if self._is_blocked:  # for a moment, where it starts a thread
            return
        if not masks.get("SigCgt", 0) & _BIT:
            self._end("does not listen to the signal that asks any more")
            return
        if not self._is_at_rest(self.pid):
            return
        others = [tid for tid in numbers_in(f"/proc/{self.pid}/task") if tid != self.pid]
        os.ftruncate(self._memfd, TEXT)
        self._to_ask = sorted(others)[:_MOST_THREADS]
        if not self._send(self.pid, TEXT):
            self._end(_ENDED)

    def _is_at_rest(self, tid: int) -> bool:
        """Whether a thread may be asked: it waits for something, or has run for long."""
        if _state(self.pid, tid) != "R" or time.monotonic() >= self._patient_until:
            return True
        self.done += 1
        return False

    def _send(self, tid: int, begin: int) -> bool:
        """Ask a thread, whose stack will be written from ``begin`` on."""
        self._asking, self._begin, self._looks = tid, begin, 0
        # To the thread: sent to the process, it is given to another one where the main thread blocks it for a moment.
        return not is_dead(self._pidfd) and _libc.tgkill(self.pid, tid, int(SIGNAL)) == 0

    def _go_on(self) -> None:
        """Take a thread's stack when it is written, and ask the next one."""
        masks = _masks(self.pid, self._asking) if self._asking else {}
        if masks and (masks["SigPnd"] | masks["SigBlk"] | masks["ShdPnd"]) & _BIT:
            if is_dead(self._pidfd):
                self._end(_ENDED)
            elif _state(self.pid) in "Tt":
                self._end(_STOPPED)
            return
        size = os.fstat(self._memfd).st_size
        self._looks += 1
        if size <= self._begin and is_dead(self._pidfd):
            self._end("" if self._threads else _ENDED)
            return
        if masks and size <= self._begin and self._looks < _LOOKS:
            return
        if self._asking:
            self._take(size)
        self._ask_next(size)

    def _ask_next(self, size: int) -> None:
        """Ask another thread, the next one that is at rest; it is the end if there is none left."""
        self._asking = 0
        busy = []
        for tid in self._to_ask or ():
            with contextlib.suppress(FileNotFoundError):  # it has ended
                masks = _masks(self.pid, tid)
                if not masks or not masks["SigCgt"] & ~masks["SigBlk"] & _BIT:
                    continue
                if self._asking or not self._is_at_rest(tid):
                    busy.append(tid)
                elif not self._send(tid, size):
                    self._asking = 0
        self._to_ask = busy
        if not busy and not self._asking:
            self._end("")

    def _take(self, size: int) -> None:
        self.done += 1
        text = os.pread(self._memfd, max(0, size - self._begin), self._begin).decode(errors="replace")
        frames = frames_of(text)
        if frames:
            self._threads.append(Thread(self._asking, self._name(), self._asking == self.pid, frames))

    def _name(self) -> str:
        """The thread's own name; empty where it has that of the process."""
        name = _comm(self.pid, self._asking)
        return "" if name == _comm(self.pid, self.pid) else name

    def _why_not(self) -> str:
        if self._threads:
            return ""
        if self._is_blocked:
            return "blocks the signal that asks"
        if self._to_ask is None:
            return "is being asked by somebody else who does not finish"
        with contextlib.suppress(OSError):
            if _state(self.pid) == "D":
                return _UNINTERRUPTIBLE
        return "gave no answer in time"

    def _end(self, problem: str) -> None:
        if not problem and not self._threads:
            problem = "runs no Python code"
        if self._memfd >= 0:
            self._head = _read_head(self._memfd, self.pid) or self._head  # the label may be a newer one
        threads = () if problem else tuple(self._threads)
        self.answer = Stacks(self.pid, self._head.label, self.state, threads, problem, self._head.user)
        self.close()

    def close(self) -> None:
        """Let the next one ask."""
        if self._memfd >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(self._memfd, fcntl.LOCK_UN)  # a fork of this process would keep it
        for fd in (self._memfd, self._pidfd):
            if fd >= 0:
                os.close(fd)
        self._memfd = self._pidfd = -1


def exists(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        return _state(pid) not in "ZX"
    except OSError:
        return False


def user_of(pid: int) -> int | None:
    """For which process a process that offers its stacks works, 0 if for none; None if it offers none."""
    found = _find(pid)
    if found is None:
        return None
    os.close(found[0])
    # One in a container knows its user by another number, or by one that is somebody else's here.
    return found[1].user if _pid_inside(pid) == pid else 0


@dataclass(frozen=True)
class _Head:
    """What the head of a memfd says."""

    user: int = 0
    label: str = ""


def _find(pid: int) -> tuple[int, _Head] | None:
    """Open the memfd of a process and read its head; None if it has none, or only one that it inherited."""
    for number in numbers_in(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{number}"
        with contextlib.suppress(OSError):
            if os.readlink(path) != LINK:
                continue
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            head = _read_head(fd, pid)
            if head is not None:
                return fd, head
            os.close(fd)
    return None


def _read_head(fd: int, pid: int) -> _Head | None:
    data = os.pread(fd, TEXT, 0)
    if len(data) < TEXT:
        return None
    magic, owner, user, length = HEAD.unpack_from(data)
    if magic != MAGIC or owner != _pid_inside(pid):
        return None
    return _Head(user, data[HEAD.size :][:length].decode(errors="replace"))


def numbers_in(folder: str) -> list[int]:
    """The names in a folder that are numbers; none if it cannot be read."""
    try:
        return [int(name) for name in os.listdir(folder) if name.isdigit()]
    except OSError:
        return []


def owner_of(pid: int) -> int | None:
    """The user id of a process; None if there is none."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def stat_of(pid: int, tid: int = 0) -> list[str]:
    """The fields of the stat file of a process, or of one thread, behind the name."""
    with open(f"/proc/{pid}/task/{tid}/stat" if tid else f"/proc/{pid}/stat", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def _state(pid: int, tid: int = 0) -> str:
    return stat_of(pid, tid)[0]


def _masks(pid: int, tid: int) -> dict[str, int]:
    """The signal masks of a thread; empty when it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{tid}/status", errors="replace") as file:
        return {line[:6]: int(line[7:], 16) for line in file if line[6:7] == ":" and line[:3] in ("Sig", "Shd")}
    return {}


def _comm(pid: int, tid: int) -> str:
    try:
        with open(f"/proc/{pid}/task/{tid}/comm", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _pid_inside(pid: int) -> int:
    """The pid by which a process knows itself: another one, if it lives in a container."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", errors="replace") as file:
        for line in file:
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return pid
