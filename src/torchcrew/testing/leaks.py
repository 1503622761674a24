"""What a piece of code left behind: processes, threads, descriptors, shared memory, environment, signal handlers.

    before = snapshot()
    ...                                    # the code under test
    print(compare(before, snapshot()))     # what is there now and was not before, one sentence each

A snapshot is taken from `/proc` and costs about two milliseconds in a process with torch. Ended processes and threads
need moments to vanish and garbage cycles keep descriptors open, so `settle` and `assert_no_leaks` look again, with
`gc.collect()`, until nothing is left or a deadline has passed.

Some things are meant to stay: `torchcrew.testing.permanent` has them, and the reasons.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torchcrew.testing import procfs, threads
from torchcrew.testing.permanent import PERMANENT, services
from torchcrew.testing.procfs import ProcessInfo

__all__ = (
    "Descriptor",
    "Mapped",
    "Snapshot",
    "Thread",
    "assert_no_leaks",
    "compare",
    "describe",
    "settle",
    "snapshot",
)

#: How long things may take to vanish, in seconds: a killed worker with gigabytes mapped needs some tenths of one.
DEADLINE = 2.0
#: First and longest pause between two looks, in seconds.
PAUSE, LONGEST_PAUSE = 0.005, 0.1

SHM = "/dev/shm/"

#: Written by the test runner itself.
IGNORED_VARIABLES = frozenset({"PYTEST_CURRENT_TEST"})


@dataclass(frozen=True)
class Thread:
    """A thread of this process: Python's, or one that a native library started."""

    tid: int
    name: str = field(compare=False)
    is_python: bool = field(compare=False)

    def __str__(self) -> str:
        if self.is_python:
            return f"{self.name!r} (Python, tid {self.tid})"
        return f"{self.name!r} (native, tid {self.tid}, in {', '.join(threads.libraries_of(self.tid) or ['?'])})"


@dataclass(frozen=True, order=True)
class Descriptor:
    """An open descriptor and what it leads to, as `/proc/self/fd` shows it."""

    number: int
    target: str

    @property
    def kind(self) -> str:
        """One of socket, pipe, memfd, eventfd, eventpoll, pidfd, ..., device, file."""
        if self.target.startswith("/memfd:"):
            return "memfd"
        if self.target.startswith("/"):
            return "device" if self.target.startswith("/dev/") and not self.target.startswith(SHM) else "file"
        # "socket:[4711]", "anon_inode:[eventfd]" and, for the same thing in other kernels, "anon_inode:inotify"
        name = self.target.removeprefix("anon_inode:").strip("[]")
        return name.partition(":")[0]

    def __str__(self) -> str:
        pid = _pidfd_target(self.number) if self.kind == "pidfd" else None
        return f"{self.number} ({self.kind}) -> {self.target}{'' if pid is None else f' of pid {pid}'}"


@dataclass(frozen=True, order=True)
class Mapped:
    """Shared memory that is mapped into this process (however many pieces the mapping has)."""

    name: str
    device: str
    inode: int

    @property
    def kind(self) -> str:
        """What it is called in a report."""
        return "mapped semaphore" if self.name.startswith(f"{SHM}sem.") else "mapping"


@dataclass(frozen=True)
class Snapshot:
    """What this process owned at one moment."""

    processes: frozenset[ProcessInfo]
    """Living children, their children and so on, and orphans of this session (their parent died before them)."""
    zombies: frozenset[ProcessInfo]
    """Children that ended and that nobody waited for."""
    threads: frozenset[Thread]
    descriptors: frozenset[Descriptor]
    mappings: frozenset[Mapped]
    """Mapped memfds, files of /dev/shm (unlinked ones and semaphores too) and anonymous shared memory."""
    shared_files: frozenset[str]
    """Names in /dev/shm that belong to this user, without semaphores."""
    semaphores: frozenset[str]
    """Names of POSIX semaphores that belong to this user."""
    environment: Mapping[str, str]
    signals: Mapping[int, object]
    """Python's handler of each signal."""

    @property
    def memfds(self) -> frozenset[Descriptor]:
        """The descriptors that are memfds."""
        return frozenset(descriptor for descriptor in self.descriptors if descriptor.kind == "memfd")


def snapshot() -> Snapshot:
    """Look at this process now."""
    family = procfs.descendants(os.getpid())
    below = {process.pid for process in family}
    family += [process for process in procfs.orphans(os.getsid(0)) if process.pid not in below]
    shared = _shared_files()
    return Snapshot(
        processes=frozenset(process for process in family if not process.is_zombie),
        zombies=frozenset(process for process in family if process.is_zombie and process.pid in below),
        threads=frozenset(_threads()),
        descriptors=frozenset(_descriptors()),
        mappings=frozenset(_mappings()),
        shared_files=frozenset(name for name in shared if not name.startswith("sem.")),
        semaphores=frozenset(name for name in shared if name.startswith("sem.")),
        environment=MappingProxyType(dict(os.environ)),
        signals=MappingProxyType({number: signal.getsignal(number) for number in signal.valid_signals()}),
    )


def _threads() -> Iterator[Thread]:
    named = {thread.native_id: thread.name for thread in threading.enumerate()}
    for tid in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(OSError):
            name = named.get(tid) or Path(f"/proc/self/task/{tid}/comm").read_text().strip()
            yield Thread(tid, name, is_python=tid in named)


def _descriptors() -> Iterator[Descriptor]:
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that the listing itself used is gone by now
            yield Descriptor(int(number), os.readlink(f"/proc/self/fd/{number}"))


#: How mappings of memory that processes share are named in /proc/self/maps.
_SHARED_NAMES = (b"/memfd:", b"/dev/shm/", b"/dev/zero")


def _mappings() -> set[Mapped]:
    found = set()
    for line in Path("/proc/self/maps").read_bytes().split(b"\n"):  # hundreds of lines; a regex over all is dearer
        place = line.find(b"/")
        if place >= 0 and line.startswith(_SHARED_NAMES, place):
            _, _, _, device, inode, name = line.split(maxsplit=5)
            found.add(Mapped(name.decode(errors="replace"), device.decode(), int(inode)))
    return found


def _shared_files() -> list[str]:
    user = os.geteuid()
    found = []
    with contextlib.suppress(OSError), os.scandir(SHM) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid == user:
                    found.append(entry.name)
    return found


def compare(
    before: Snapshot, after: Snapshot, allow: Collection[str] = tuple(PERMANENT), ignore: Collection[str] = ()
) -> list[str]:
    """Name everything that ``after`` has and ``before`` has not.

    Args:
        allow: names from `PERMANENT`; what they stand for is not reported.
        ignore: regular expressions; a leak in whose sentence one is found is not reported.

    Returns:
        One sentence for each leak, beginning with its kind: ``"descriptor: 7 (pipe) -> pipe:[4711]"``.

    Raises:
        ValueError: ``allow`` has a name that is not in `PERMANENT`.
    """
    if unknown := sorted(set(allow) - set(PERMANENT)):
        raise ValueError(f"allow should hold names of {', '.join(PERMANENT)}, but got {', '.join(unknown)}")
    permanent = services(allow)
    found = [
        f"process: {process}"
        for process in sorted(after.processes - before.processes)
        if process.pid not in permanent.pids
    ]
    # One that lived before is the leak of who started it, however it has ended meanwhile.
    found += [f"zombie: {process}" for process in sorted(after.zombies - before.zombies - before.processes)]
    found += [
        f"thread: {thread}"
        for thread in sorted(after.threads - before.threads, key=lambda thread: thread.tid)
        if thread.tid not in permanent.threads
        and (thread.is_python or "pool_threads" not in allow or not threads.is_of_a_pool(thread.tid))
    ]
    found += [
        f"{'memfd' if descriptor.kind == 'memfd' else 'descriptor'}: {descriptor}"
        for descriptor in sorted(after.descriptors - before.descriptors)
        if not (
            descriptor.number in permanent.descriptors
            or descriptor.target.startswith(permanent.paths)
            or (descriptor.kind == "pidfd" and _pidfd_target(descriptor.number) in permanent.pids)
        )
    ]
    found += [
        f"{mapped.kind}: {mapped.name}, inode {mapped.inode}"
        for mapped in sorted(after.mappings - before.mappings)
        if not mapped.name.startswith(permanent.paths)
    ]
    found += _compare_names(before, after)
    found += _compare_settings(before, after, allow)
    return [leak for leak in found if not any(re.search(pattern, leak) for pattern in ignore)]


def _compare_names(before: Snapshot, after: Snapshot) -> list[str]:
    """Compare what has a name in /dev/shm, which all programs of the machine share."""
    ours = {os.getpid(), *(process.pid for process in after.processes)}
    files = sorted(after.shared_files - before.shared_files)
    semaphores = sorted(after.semaphores - before.semaphores)
    found = [f"shared memory: {SHM}{name}" for name in files if not _is_of_others(name, ours)]
    return found + [f"semaphore: {SHM}{name}" for name in semaphores if not _is_of_others(name, ours)]


def _is_of_others(name: str, ours: Collection[int]) -> bool:
    """Whether this file of /dev/shm is another program's: it holds it, or made it and has removed it meanwhile."""
    maker = re.match(r"torch_(\d+)_", name)
    if maker and int(maker[1]) not in ours and os.path.exists(f"/proc/{maker[1]}"):
        return True
    try:
        holders = {pid for pid in procfs.pids() if _holds(pid, os.stat(f"{SHM}{name}"))}
    except FileNotFoundError:
        return True
    return bool(holders) and holders.isdisjoint(ours)


def _holds(pid: int, file: os.stat_result) -> bool:
    """Whether a process has this file mapped or open, as far as we may see it.

    By its number: glibc makes a semaphore under another name first, and /proc goes on showing that one.
    """
    mark = f" {os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x} {file.st_ino} ".encode()
    with contextlib.suppress(OSError):
        if mark in Path(f"/proc/{pid}/maps").read_bytes():
            return True
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                place = f"/proc/{pid}/fd/{number}"
                if os.readlink(place).startswith(SHM) and os.path.samestat(os.stat(place), file):
                    return True
    return False


def _compare_settings(before: Snapshot, after: Snapshot, allow: Collection[str]) -> list[str]:
    """Compare environment and signal handlers. Values stay out of the report: the environment holds secrets."""
    found = []
    for name in sorted(before.environment.keys() | after.environment.keys()):
        old, new = before.environment.get(name), after.environment.get(name)
        permanent = name.startswith("KMP_") and old is None and "openmp_environment" in allow
        if old != new and name not in IGNORED_VARIABLES and not permanent:
            found.append(f"environment: {name} was {'set' if old is None else 'removed' if new is None else 'changed'}")
    for number, handler in after.signals.items():
        # pytest-timeout takes its alarm back as soon as a test has failed.
        own = (number == signal.SIGCHLD and "sigchld" in allow) or (number, handler) == (signal.SIGALRM, signal.SIG_DFL)
        if handler != before.signals.get(number) and not own:
            found.append(f"signal handler: {signal.Signals(number).name} is now {handler!r}")
    return found


def _pidfd_target(descriptor: int) -> int | None:
    """Return the pid that a pidfd of this process stands for; -1 when that process is gone, None for no pidfd."""
    with contextlib.suppress(OSError):
        match = re.search(r"^Pid:\s*(-?\d+)", Path(f"/proc/self/fdinfo/{descriptor}").read_text(), re.MULTILINE)
        return None if match is None else int(match[1])
    return None


def settle(
    before: Snapshot,
    deadline: float = DEADLINE,
    allow: Collection[str] = tuple(PERMANENT),
    ignore: Collection[str] = (),
) -> list[str]:
    """Compare ``before`` with now, again and again until nothing is left or ``deadline`` seconds have passed.

    The first look collects no garbage and closes no warm arena, so that it costs milliseconds when nothing leaks.

    Returns:
        What is left, as `compare` names it.
    """
    end = time.monotonic() + deadline
    pause = PAUSE
    found = compare(before, snapshot(), allow, ignore)
    while found:
        _trim()
        if found := compare(before, snapshot(), allow, ignore):
            gc.collect()
            _trim()  # arenas that only garbage held
            found = compare(before, snapshot(), allow, ignore)
        if not found or time.monotonic() >= end:
            break
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return found


def _trim() -> None:
    """Close the arenas that are kept warm for the next loader: they are idle on purpose, not leaked."""
    memory: Any = sys.modules.get("torchcrew.memory")
    if memory is not None and hasattr(memory, "trim"):
        memory.trim()


@contextlib.contextmanager
def assert_no_leaks(
    deadline: float = DEADLINE, allow: Collection[str] = tuple(PERMANENT), ignore: Collection[str] = ()
) -> Iterator[None]:
    """Fail if the body of the ``with`` leaves anything behind; its own exception passes, unchecked.

    ``allow`` and ``ignore`` are those of `compare`.

    Example:
        with assert_no_leaks():
            train(epochs=1)

    Raises:
        AssertionError: names every leak.
    """
    before = snapshot()
    yield
    if found := settle(before, deadline, allow, ignore):
        raise AssertionError(describe(found))


def describe(found: Collection[str]) -> str:
    """Put the leaks in one text, a line each."""
    return "\n  ".join([f"{len(found)} leak{'s' if len(found) > 1 else ''}:", *found])
