"""What makes a fork of this process unsafe: other threads, whose locks a child inherits as they are, and CUDA."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import warnings
from typing import Any

__all__ = ("dangers", "users_level", "warn_of_dangers")

#: How long a native thread that does something is taken for one that is about to end, in seconds.
_LEAVING = 0.01

#: Modules whose threads are made to be forked under: ours, and the standard library's queues and pools.
_FORK_SAFE = ("torchcrew.", "multiprocessing.")
#: Modules whose processes are made for it: a loader's worker uses one thread and nothing that it has not made itself.
_LOADERS = ("torchcrew.data.", "torch.utils.data.")


def warn_of_dangers(target: Any) -> None:
    """Give one RuntimeWarning, at the line that starts the process, if forking this one is unsafe.

    Args:
        target: what the new process will run.
    """
    if _module_of(target).startswith(_LOADERS) or _is_fork_safe(threading.current_thread()):
        return
    found = dangers()
    if found:
        warnings.warn(
            f"fork of a process with {' and '.join(found)}: what these hold at this moment (locks, a context) stays so "
            "in the child, which may hang or crash. The start method 'zygote' is as quick and has no such trouble: "
            "torchcrew.multiprocessing.set_start_method('zygote'), or 'spawn'.",
            RuntimeWarning,
            stacklevel=users_level(),
        )


def dangers() -> list[str]:
    """What there is in this process that a fork does not copy well, as phrases; none where nothing was found."""
    found = []
    threads = _threads()
    if threads:
        found.append(f"{len(threads)} other thread{'s' * (len(threads) > 1)} ({', '.join(threads)})")
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found.append("CUDA initialised")
    return found


def _threads() -> list[str]:
    """The other threads: a Python thread's name, or the kernel's for one of native code."""
    _let_threads_end()
    python = {thread.native_id: thread for thread in threading.enumerate()}
    names: list[str] = []
    unnamed: list[str] = []
    own = _comm(os.getpid())
    for tid in _thread_ids():
        thread = python.get(tid)
        if tid == threading.get_native_id() or (thread is not None and _is_fork_safe(thread)):
            continue
        name = thread.name if thread is not None else _comm(tid)
        if name:  # else it has ended since
            (unnamed if thread is None and name == own else names).append(name)
    # A thread of native code inherits its creator's name. OpenBLAS, whose threads start when numpy is imported, ends
    # them itself before a fork; the others that look so are OpenMP's, which hang in a child.
    left = max(0, len(unnamed) - _openblas_threads()) if unnamed else 0
    return names + [f"{own}: native, as OpenMP's"] * left


def _let_threads_end() -> None:
    """Give Python threads that were joined, and are still on their way out, a moment for it."""
    deadline = time.monotonic() + _LEAVING
    while time.monotonic() < deadline:
        known = {thread.native_id for thread in threading.enumerate()}
        if not any(_state(tid) not in ("S", "") for tid in _thread_ids() if tid not in known):
            return
        time.sleep(0.0005)


def _state(tid: int) -> str:
    """The kernel's letter for what a thread does: a pool's rests (S)."""
    try:
        with open(f"/proc/self/task/{tid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _thread_ids() -> list[int]:
    try:
        return sorted(int(tid) for tid in os.listdir("/proc/self/task"))
    except OSError:
        return []


def _comm(tid: int) -> str:
    try:
        with open(f"/proc/self/task/{tid}/comm") as comm:
            return comm.read().strip()
    except OSError:
        return ""


def _openblas_threads() -> int:
    """How many threads OpenBLAS keeps now."""
    count = 0
    for path in _openblas_paths():
        library = ctypes.CDLL(path)
        try:
            if ctypes.c_int.in_dll(library, "blas_server_avail").value:
                count += max(0, ctypes.c_int.in_dll(library, "blas_num_threads").value - 1)
        except ValueError:  # built without these names
            continue
    return count


def _openblas_paths() -> set[str]:
    with open("/proc/self/maps") as maps:
        return {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "openblas" in line}


def _is_fork_safe(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)
    return type(thread).__module__.startswith(_FORK_SAFE) or _module_of(target).startswith(_FORK_SAFE)


def _module_of(target: Any) -> str:
    while hasattr(target, "func"):  # partial
        target = target.func
    module = getattr(target, "__module__", None)
    return module if isinstance(module, str) else ""


def users_level() -> int:
    """The ``stacklevel`` at which the caller's warning shows the first line that is neither ours nor the library's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("torchcrew.", "multiprocessing.")
    ):
        level, frame = level + 1, frame.f_back
    return level
