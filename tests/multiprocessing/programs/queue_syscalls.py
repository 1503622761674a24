"""A producer or a consumer that is killed at a system call: ``queue_syscalls.py VICTIM POINT ...``.

    this process ── forks ──► victim, traced; a second producer
         └── starts ──► strace --attach=victim --inject=NAME:signal=KILL:when=N

VICTIM is "producer" or "consumer". A POINT is "NAME:N", the N-th call of that name after the victim was attached, or
"count", which kills nobody and tells how many calls there are of each name. For every trial one line of JSON is
printed. Nobody waits for anything longer than the deadline; who does has failed.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from queue import Empty
from typing import Any

import torch

import torchcrew.multiprocessing as mp
from tests.memory.programs.relay import Gate, in_child, read_all, reap
from tests.multiprocessing.programs.queue_kills import check, message

MESSAGES = 12
DEADLINE = 10.0
VICTIM, OTHER = 1, 2


def put_all(queue: Any, producer: int) -> None:
    for number in range(MESSAGES):
        queue.put((producer, number, message(producer, number)))


def get_one(queue: Any, received: dict[int, list[int]], seconds: float) -> bool:
    """Take one message and check it; whether there was one."""
    try:
        producer, number, got = queue.get(timeout=seconds)
    except Empty:
        return False
    check(got, producer, number)
    received[producer].append(number)
    return True


def run_producer(queue: Any, gate: Gate, report: int) -> dict[str, Any]:
    """The victim puts, and so does another; this process gets."""

    def work() -> None:
        gate.wait()
        put_all(queue, VICTIM)

    victim = in_child(work, report)
    yield_pid = yield_to_strace(gate)
    other = in_child(lambda: put_all(queue, OTHER), report)
    yield_pid()
    received: dict[int, list[int]] = collections.defaultdict(list)
    statuses = []
    for pid in (victim, other):
        end = time.monotonic() + DEADLINE
        pidfd = os.pidfd_open(pid)
        while not os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            assert time.monotonic() < end, "a producer waits"
            get_one(queue, received, 0.01)
        os.close(pidfd)
        statuses.append(reap(pid))
    while get_one(queue, received, 0.0):
        pass
    assert received[OTHER] == list(range(MESSAGES)), received
    assert received[VICTIM] == list(range(len(received[VICTIM]))), received
    return {"victim": statuses[0], "other": statuses[1], "received": len(received[VICTIM])}


def run_consumer(queue: Any, gate: Gate, report: int) -> dict[str, Any]:
    """The victim gets half, and says what; this process puts everything, and gets the rest."""
    read, write = os.pipe()

    def work() -> None:
        gate.wait()
        for _ in range(MESSAGES // 2):
            received: dict[int, list[int]] = collections.defaultdict(list)
            assert get_one(queue, received, DEADLINE)
            os.write(write, f"{received[OTHER][0]}\n".encode())

    victim = in_child(work, report)
    os.close(write)
    go = yield_to_strace(gate)
    go()
    put_all(queue, OTHER)
    status = reap(victim)
    told = [int(line) for line in read_all(read)]
    os.close(read)
    received: dict[int, list[int]] = collections.defaultdict(list)
    while get_one(queue, received, 0.0):
        pass
    everything = told + received[OTHER]
    assert everything == sorted(set(everything)), everything
    missing = MESSAGES - len(everything)
    assert missing <= (status != 0), f"{missing} are missing"
    return {"victim": status, "other": 0, "received": len(told)}


def yield_to_strace(gate: Gate) -> Any:
    """Start strace at the victim; returns what lets the victim go."""
    trial = Trial.current
    assert trial is not None
    inject = [] if trial.point == "count" else ["-e", "inject={}:signal=KILL:when={}".format(*trial.point.split(":"))]
    command = ["strace", "-o", trial.trace, *inject, "-p", str(gate.pid())]
    trial.strace = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert trial.strace.stderr is not None
    said = trial.strace.stderr.readline()
    assert b"attached" in said, said
    return gate.open


class Trial:
    """One run, with the victim killed at ``point``."""

    current: Trial | None = None

    def __init__(self, point: str, trace: str) -> None:
        self.point, self.trace = point, trace
        self.strace: subprocess.Popen[bytes] | None = None
        Trial.current = self

    def run(self, victim: str) -> dict[str, Any]:
        """What became of it."""
        gc.collect()
        descriptors = len(os.listdir("/proc/self/fd"))
        read, report = os.pipe()
        gate, queue = Gate(), mp.get_context("fork").Queue()
        facts: dict[str, Any] = {"point": self.point}
        try:
            facts |= (run_producer if victim == "producer" else run_consumer)(queue, gate, report)
            queue.put("still works")
            assert queue.get(timeout=DEADLINE) == "still works"
        except Exception as error:
            facts["error"] = repr(error)
        os.close(report)
        for line in read_all(read):
            facts.update(json.loads(line))
        os.close(read)
        gate.close()
        if self.strace is not None:
            self.strace.communicate(timeout=DEADLINE)
        names = [line.partition("(")[0] for line in Path(self.trace).read_text(errors="replace").splitlines()]
        if self.point == "count":
            facts["counts"] = collections.Counter(name for name in names if name.isidentifier())
        del queue
        gc.collect()
        if "error" not in facts and len(os.listdir("/proc/self/fd")) != descriptors:
            facts["error"] = "descriptors are left"
        return facts


def main(victim: str, points: list[str]) -> None:
    torch.set_num_threads(1)
    put_all(mp.get_context("fork").Queue(), OTHER)  # what is made once is made
    for point in points:
        with tempfile.NamedTemporaryFile(prefix="torchcrew-trace-") as trace:
            facts = Trial(point, trace.name).run(victim)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        os.write(1, (json.dumps(facts) + "\n").encode())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
