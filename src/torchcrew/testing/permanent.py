"""What is started once per process and stays on purpose, and how it is told from a leak.

Everything here is known by asking its owner for the pid, the descriptor, the thread or the path; a name alone, which
anybody could use, is never enough. Only modules that are loaded are asked: what nobody imported has started nothing.
The standard library has no public names for it, so a change there shows as a leak, not as an error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

__all__ = ("PERMANENT", "Services", "services")

#: What is started once per process and stays on purpose: name -> reason.
PERMANENT: Mapping[str, str] = MappingProxyType(
    {
        # CPython starts one at the first named semaphore or shared block and keeps it to unlink what is left at exit.
        "resource_tracker": "multiprocessing's resource tracker lives as long as the program",
        # A descriptor that travels in a queue, as that of every tensor does, waits in this process until the receiver
        # asks for it. CPython starts the thread that answers, and its listening socket, with the first one. A tensor
        # that nobody ever asks for keeps its descriptor, which is a leak and is reported.
        "resource_sharer": "multiprocessing's resource sharer serves descriptors as long as the program lives",
        # CPython keeps the server, with preloaded modules, for the next start. Its children are not permanent.
        "forkserver": "multiprocessing's fork server lives as long as the program",
        # mp.Value and mp.Array live in a heap whose arenas stay mapped below 4 MB of free space.
        "multiprocessing_heap": "multiprocessing's heap keeps its arenas for the next Value",
        # It must be alive when the program is killed. It costs a control socket and a pidfd.
        "guardian": "torchcrew's guardian ends with the program, within milliseconds",
        # Starting one costs the import of torch, which is what it is there to save.
        "zygote": "torchcrew's zygote is kept for the next start",
        # A process that offers its stacks does so to its end: one memfd.
        "stacks": "torchcrew's memfd for this process's stacks is kept to be asked for them",
        # Thread pools of OpenMP, BLAS and torch (intra-op, inter-op, autograd) are made once and never end.
        "pool_threads": "thread pools of numeric libraries live as long as the program",
        # torch installs it with the first worker, for good: it is what reports a killed worker.
        "sigchld": "torch's SIGCHLD handler, which reports killed workers, stays installed",
        # sklearn and others set them once, at import, for Intel's OpenMP.
        "openmp_environment": "libraries set KMP_* variables once, at import",
        # matplotlib caches the fonts that it has used, each with its file open.
        "matplotlib_fonts": "matplotlib keeps the files of its own fonts open for the next text",
    }
)


@dataclass(frozen=True)
class Services:
    """What the permanent services own now."""

    pids: frozenset[int]
    descriptors: frozenset[int]
    threads: frozenset[int]
    """Native ids."""
    paths: tuple[str, ...]
    """Beginnings of paths: files whose names begin so stay open or mapped."""


def services(allow: Collection[str]) -> Services:
    """Ask the owners of those permanent things that ``allow`` names."""
    pids: set[Any] = set()
    descriptors: set[Any] = set()
    threads: set[Any] = set()
    if "resource_tracker" in allow:
        tracker = _loaded("multiprocessing.resource_tracker", "_resource_tracker")
        pids.add(getattr(tracker, "_pid", None))
        descriptors.add(getattr(tracker, "_fd", None))
    if "resource_sharer" in allow:
        sharer = _loaded("multiprocessing.resource_sharer", "_resource_sharer")
        threads.add(getattr(getattr(sharer, "_thread", None), "native_id", None))
        descriptors.add(_socket_of(getattr(sharer, "_listener", None)))  # None before the first use
    if "forkserver" in allow:
        server = _loaded("multiprocessing.forkserver", "_forkserver")
        pids.add(getattr(server, "_forkserver_pid", None))
        descriptors.add(getattr(server, "_forkserver_alive_fd", None))
    if "guardian" in allow and (guardian := sys.modules.get("torchcrew.crew.guardian")):
        pids.add(guardian.pid())
        descriptors.update(guardian.descriptors())
    if "zygote" in allow and (zygote := sys.modules.get("torchcrew.crew.zygote")):
        pids.update(zygote.pids())
        descriptors.update(zygote.descriptors())
    if "stacks" in allow and (stacks := sys.modules.get("torchcrew.crew.stacks")):
        descriptors.update(stacks.descriptors())
    return Services(
        frozenset(pids - {None}), frozenset(descriptors - {None}), frozenset(threads - {None}), tuple(_paths(allow))
    )


def _paths(allow: Collection[str]) -> list[str]:
    found = []
    if "multiprocessing_heap" in allow:
        found.append(f"/dev/shm/pym-{os.getpid()}-")
    data_path = _loaded("matplotlib", "get_data_path") if "matplotlib_fonts" in allow else None
    if data_path is not None:
        found.append(os.path.join(os.path.realpath(data_path()), ""))  # /proc shows no symbolic links
    return found


def _socket_of(listener: Any) -> int | None:
    """The descriptor that a `multiprocessing.connection.Listener` listens on."""
    listening = getattr(getattr(listener, "_listener", None), "_socket", None)
    return None if listening is None else int(listening.fileno())


def _loaded(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)
