"""The memory of a process and everything below it, sampled over time.

PSS, from ``/proc/PID/smaps_rollup``, counts a page that n processes share as 1/n for each: summed over the processes it
is what they take from the machine together, shared memory included. (RSS would count a shared batch once per process.)
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

__all__ = ("PssSampler", "process_tree", "tree_pss")

INTERVAL_S = 0.05
MAX_LOAD = 0.5
"""Share of one core that sampling may take: the kernel walks all page tables of a process, about 10 ms with torch."""


class PssSampler:
    """Samples the PSS of the process tree under ``pid`` in a thread of its own until `stop`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stopping = threading.Event()
        self._samples: list[tuple[float, int]] = []
        self._thread = threading.Thread(target=self._run, name="pss-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> list[tuple[float, int]]:
        """End sampling; returns (`time.monotonic` value, bytes) pairs."""
        self._stopping.set()
        self._thread.join(timeout=5)
        return self._samples

    def _run(self) -> None:
        pause = INTERVAL_S
        while not self._stopping.wait(pause):
            started = time.monotonic()
            pss = tree_pss(self._pid)
            if pss:
                self._samples.append((started, pss))
            spent = time.monotonic() - started
            pause = max(INTERVAL_S - spent, spent / MAX_LOAD - spent)


def tree_pss(pid: int) -> int:
    """Bytes that the process ``pid`` and all its descendants take together; 0 when it is gone."""
    return sum(_pss(member) for member in process_tree(pid))


def process_tree(pid: int) -> list[int]:
    """``pid`` and its descendants, as far as they are still there."""
    found, todo = [], [pid]
    while todo:
        current = todo.pop()
        found.append(current)
        try:
            tasks = list(Path(f"/proc/{current}/task").iterdir())
        except OSError:
            continue
        for task in tasks:
            todo.extend(_children(task))
    return found


def _children(task: Path) -> list[int]:
    try:
        return [int(child) for child in (task / "children").read_text().split()]
    except OSError:  # the thread has ended
        return []


def _pss(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            for line in rollup:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:  # the process has ended, or is a zombie
        pass
    return 0
