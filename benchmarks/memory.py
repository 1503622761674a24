"""Peak memory of all processes while batches of 19 MB are loaded.

    python -m benchmarks.memory [--repeats N]

Two workers, 32 × (3, 224, 224) float32, default collate. Each measurement is a program of its own, watched from outside
every 20 ms (or as fast as the kernel can tell): PSS, which counts a page that n processes share as 1/n for each, summed
over the program and everything below it, the guardian included. Two consumers: one that only takes batches, and one
that is busy for 20 ms with each, so that the workers always are as far ahead as they may be.

PSS misses what no process has mapped at that moment, such as stock's batches on their way; the JSON has, besides, the
peak of anonymous memory plus the machine's shared memory above what it was before (``with_shmem_bytes``), which other
programs disturb.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch.utils.data

import torchcrew.data
from benchmarks import harness
from benchmarks.datasets import Images
from benchmarks.harness import OURS, STOCK, Claim, Measurement, Row

__all__ = ("pss", "tree")

WORKERS, BATCH = 2, 32
INTERVAL = 0.02
#: Seconds a batch keeps the consumer, and batches that are watched: enough for a few dozen samples.
CONSUMERS = {"eager": (0.0, 320), "busy": (0.02, 64)}
#: Batches of the epoch in which all are hashed.
HASHED = 48
#: Seconds that one program may take.
DEADLINE = 180


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        _program(sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
        return
    bench = harness.Benchmark("memory", str(__doc__))
    for consumer, (seconds, batches) in CONSUMERS.items():
        digests: dict[str, list[str]] = {}
        runs = {name: partial(_run, name, seconds, batches, digests) for name in (STOCK, OURS)}
        measured = harness.alternate(runs, bench.repeats)
        harness.compare(OURS, digests[OURS], digests[STOCK])
        bench.add(
            Row(
                key=f"memory_{consumer}",
                work=f"peak memory (PSS of all processes), 19 MB batches, {consumer} consumer",
                metric="peak_bytes",
                per="program",
                measured=measured,
                claims=[Claim("not more than stock", at_least=1.0)],
                verified=harness.verdict(list(measured), digests[STOCK]),
            )
        )
    bench.finish()


def _program(name: str, seconds: float, batches: int) -> None:
    """Load while being watched, then once more to hash every batch."""
    make = torchcrew.data.DataLoader if name == OURS else torch.utils.data.DataLoader
    watched, hashed = (Images(BATCH * count, torch.float32) for count in (batches, HASHED))
    print("begin", flush=True)
    for _batch in make(watched, BATCH, num_workers=WORKERS):
        time.sleep(seconds)
    print("end", flush=True)
    sys.stdin.readline()
    print(json.dumps([harness.digest(batch) for batch in make(hashed, BATCH, num_workers=WORKERS)]))


def _run(name: str, seconds: float, batches: int, digests: dict[str, list[str]]) -> Measurement:
    command = [sys.executable, "-m", "benchmarks.memory", "--child", name, str(seconds), str(batches)]
    with subprocess.Popen(
        command, cwd=harness.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        killer = threading.Timer(DEADLINE, program.kill)
        killer.start()
        try:
            assert program.stdout is not None
            assert program.stdin is not None
            _expect(program.stdout.readline(), "begin", name)
            watch = _Watch(program.pid)
            _expect(program.stdout.readline(), "end", name)
            peak = watch.stop()
            program.stdin.write("\n")
            program.stdin.flush()
            found = json.loads(program.stdout.readline())
        finally:
            killer.cancel()
    harness.compare(name, found, digests.setdefault(name, found))
    return peak


def _expect(line: str, wanted: str, name: str) -> None:
    if line.strip() != wanted:
        sys.exit(f"the program of {name} ended, or said {line!r} and not {wanted!r}")


class _Watch(threading.Thread):
    """Samples a process tree until it is stopped."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._stopping = threading.Event()
        self._peak = {"peak_bytes": 0.0, "with_shmem_bytes": 0.0, "samples": 0.0}
        self._shmem_before = _shmem()
        self.start()

    def run(self) -> None:
        while not self._stopping.wait(INTERVAL):
            sampled = [rollup(pid) for pid in tree(self._pid)]
            shmem = max(0, _shmem() - self._shmem_before)
            total = sum(sample.get("Pss", 0) for sample in sampled)
            without = sum(sample.get("Pss", 0) - sample.get("Pss_Shmem", 0) for sample in sampled)
            self._peak["peak_bytes"] = max(self._peak["peak_bytes"], total)
            self._peak["with_shmem_bytes"] = max(self._peak["with_shmem_bytes"], without + shmem)
            self._peak["samples"] += 1

    def stop(self) -> Measurement:
        self._stopping.set()
        self.join(10)
        return dict(self._peak)


def tree(pid: int) -> list[int]:
    """``pid`` and its descendants."""
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        try:
            for task in Path(f"/proc/{found[-1]}/task").iterdir():
                todo.extend(map(int, (task / "children").read_text().split()))
        except OSError:  # it has ended meanwhile
            continue
    return found


def rollup(pid: int) -> dict[str, int]:
    """The sums of ``/proc/PID/smaps_rollup`` in bytes; empty for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return {}
    return {name.rstrip(":"): int(kilobytes) << 10 for name, kilobytes, *_ in map(str.split, lines)}


def pss(pid: int) -> int:
    """Proportional set size of one process in bytes; 0 if it has ended."""
    return rollup(pid).get("Pss", 0)


def _shmem() -> int:
    fields: dict[str, Any] = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["Shmem"].split()[0]) << 10


if __name__ == "__main__":
    main()
