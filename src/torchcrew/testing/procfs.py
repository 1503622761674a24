"""Processes as `/proc` shows them: who descends from whom, who carries a mark.

Everything here only reads. A process that ends while it is looked at is left out, never an error.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ("ProcessInfo", "descendants", "orphans", "pids", "read_process", "with_environment")

#: Longest command line in a report, in characters.
COMMAND_LENGTH = 160


@dataclass(frozen=True, order=True)
class ProcessInfo:
    """One process at one moment; two are equal when they are the same process, whatever it does meanwhile."""

    pid: int
    started: int
    """Clock ticks since boot. A pid is used again some day, a pid with its start is not."""
    parent: int = field(compare=False, default=0)
    group: int = field(compare=False, default=0)
    session: int = field(compare=False, default=0)
    state: str = field(compare=False, default="?")
    """The letter of `ps`: R runs, S sleeps, D waits for a disk, T is stopped, Z is a zombie."""
    command: str = field(compare=False, default="")

    @property
    def is_zombie(self) -> bool:
        """Whether it has ended and waits for its parent to ask how."""
        return self.state in "ZXx"

    def __str__(self) -> str:
        return f"pid {self.pid} (state {self.state}, parent {self.parent}): {self.command}"


def pids() -> list[int]:
    """Return the pids of all processes that this one can see."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def read_process(pid: int) -> ProcessInfo | None:
    """Describe one process, or return None if there is none with this pid."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    # The name stands in parentheses and may hold spaces and parentheses itself: the last one ends it.
    name_end = stat.rindex(b")")
    name = stat[stat.index(b"(") + 1 : name_end].decode(errors="replace")
    fields = stat[name_end + 2 :].split()
    words = " ".join(command.replace(b"\0", b" ").decode(errors="replace").split())  # `python -c` has line breaks
    return ProcessInfo(
        pid=pid,
        started=int(fields[19]),
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        state=fields[0].decode(),
        command=words[:COMMAND_LENGTH] or f"[{name}]",  # a zombie has no command line any more
    )


def descendants(pid: int) -> list[ProcessInfo]:
    """Return the children of ``pid``, their children and so on, zombies included, ``pid`` itself not."""
    found: list[ProcessInfo] = []
    seen = {pid}
    to_visit = [pid]
    while to_visit:
        for child in _children(to_visit.pop()):
            info = None if child in seen else read_process(child)
            if info is not None:
                seen.add(child)
                found.append(info)
                to_visit.append(child)
    return found


def _children(pid: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    found: list[int] = []
    for thread in threads:  # a child belongs to the thread that forked it
        try:
            found.extend(map(int, Path(f"/proc/{pid}/task/{thread}/children").read_bytes().split()))
        except FileNotFoundError:
            if os.path.exists(f"/proc/{pid}/task/{thread}"):  # a kernel without CONFIG_PROC_CHILDREN
                return [info.pid for info in map(read_process, pids()) if info is not None and info.parent == pid]
        except OSError:
            continue
    return found


def orphans(session: int) -> list[ProcessInfo]:
    """Return the processes of ``session`` whose parent died: they were handed to a process outside of it, or to init.

    `getsid` costs a microsecond, reading a process a hundred: only those of the session are read.
    """
    found = []
    for pid in pids():
        if pid == session or _session_of(pid) != session:
            continue
        info = read_process(pid)
        if info is not None and info.pid != os.getpid() and (info.parent <= 1 or _session_of(info.parent) != session):
            found.append(info)
    return found


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def with_environment(name: str, part: str) -> list[ProcessInfo]:
    """Return every process that was started with ``part`` in the value of the environment variable ``name``.

    A process keeps that text for life, also when its parents are gone, and a fork shows its parent's; only one that
    was started with a cleaned environment is missed. Zombies have none. The caller is left out.
    """
    found = []
    for pid in pids():
        if pid == os.getpid():
            continue
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # ended, or somebody else's
            continue
        start = f"{name}=".encode()
        if any(line.startswith(start) and part.encode() in line for line in environment.split(b"\0")):
            info = read_process(pid)
            if info is not None and not info.is_zombie:
                found.append(info)
    return found
