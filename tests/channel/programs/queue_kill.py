"""A queue between processes one of which is killed at a system call: `queue_kill.py VICTIM SEED POINT ...`

    this process ── forks ──► 2 producers ══ queue ══► 2 consumers           in a new queue for every trial
         └── starts ──► strace --attach=victim --inject=NAME:signal=KILL:when=N

VICTIM is "producer" or "consumer": the first of the two. For POINT, and the rest, see `tests/memory/programs/relay.py`.
For every trial one line of JSON is printed: how each process ended, and what was received.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

import torchcrew
from tests.memory.programs.relay import Gate, check, in_child, message, read_all, reap
from torchcrew.errors import QueueClosed

MESSAGES = 12
DEADLINE = 10.0
#: So little that the blocks of the dead must come back.
BUDGET = 6 << 20
_PR_SET_CHILD_SUBREAPER = 36


def produce(queue: Any, seed: int, source: int, report: int, gate: Gate | None) -> None:
    """Put all messages of one source; when the queue is closed, all memory must come back."""
    if gate is not None:
        gate.wait()
    for number in range(MESSAGES):
        queue.put((source, message(seed + source, number)), timeout=DEADLINE)
    os.write(report, (json.dumps({"put": source}) + "\n").encode())
    end = time.monotonic() + DEADLINE
    while not queue.closed:
        assert time.monotonic() < end, "the queue is not closed"
        time.sleep(0.001)
    lender = queue._lender
    while True:
        with lender._lock:
            lender._reclaim()
            lender._owner.recycle()
            if lender._owner.used == 0:
                return
        assert time.monotonic() < end, f"{lender._owner.used} bytes did not come back"
        time.sleep(0.001)


def consume(queue: Any, seed: int, report: int, gate: Gate | None) -> None:
    """Get until the queue is closed, with some held."""
    if gate is not None:
        gate.wait()
    held: list[Any] = []
    while True:
        try:
            source, got = queue.get(timeout=2 * DEADLINE)
        except QueueClosed:
            return
        check(got, got["number"])
        os.write(report, (json.dumps({"got": [source, got["number"]]}) + "\n").encode())
        held = [*held, got][-2:]
        for old in held:
            check(old, old["number"])


def run(victim: str, seed: int, report: int, gate: Gate, started: Any) -> None:
    """One run; reports how each process ended."""
    descriptors = len(os.listdir("/proc/self/fd"))
    queue = torchcrew.Queue(memory_budget=BUDGET)
    pids: dict[str, int] = {}
    for k in range(2):
        to_gate = gate if victim == "consumer" and k == 0 else None
        work = functools.partial(consume, queue, seed, report, to_gate)
        pids[f"consumer {k}"] = in_child(work, report)
    for k in range(2):
        to_gate = gate if victim == "producer" and k == 0 else None
        work = functools.partial(produce, queue, seed, k, report, to_gate)
        pids[f"producer {k}"] = in_child(work, report)
    started()
    # Everything is put, or its producer is gone, when nothing more waits and the victim is gone or idle.
    first = f"{victim} 0"
    status: dict[str, int] = {}
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        if first not in status:
            done, code = os.waitpid(pids[first], os.WNOHANG)
            if done:
                status[first] = os.waitstatus_to_exitcode(code)
        reports = Path(f"/proc/self/fd/{REPORTS}").read_text()
        ended = victim == "producer" and first in status
        if '{"put": 1}' in reports and ('{"put": 0}' in reports or ended) and queue.empty():
            break
        time.sleep(0.002)
    else:
        raise AssertionError("not everything was put and got")
    queue.close()
    for name, pid in pids.items():
        if name not in status:
            status[name] = reap(pid)
    del queue, work
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors, "descriptors are left"
    os.write(report, (json.dumps({"status": status}) + "\n").encode())


#: The file that reports go to.
REPORTS = -1


def trial(victim: str, seed: int, point: str) -> dict[str, Any]:
    """One run, with the victim killed at ``point``."""
    global REPORTS
    gate = Gate()
    alive, end_of_all = os.pipe()
    with tempfile.NamedTemporaryFile(prefix="torchcrew-trace-") as trace, tempfile.TemporaryFile("a+b") as reports:
        REPORTS = reports.fileno()
        ready, go = os.pipe()
        runner = in_child(lambda: run(victim, seed, REPORTS, gate, lambda: os.read(ready, 1)), REPORTS)
        os.close(end_of_all)
        inject = [] if point == "count" else ["-e", "inject={}:signal=KILL:when={}".format(*point.split(":"))]
        command = ["strace", "-o", trace.name, *inject, "-p", str(gate.pid())]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as strace:
            assert strace.stderr is not None
            said = strace.stderr.readline()
            assert b"attached" in said, said
            os.write(go, b"x")
            gate.open()
            status = reap_within(runner, 3 * DEADLINE)
            read_all(alive)
        names = [line.partition("(")[0] for line in trace.read().decode(errors="replace").splitlines() if "(" in line]
        reports.seek(0)
        lines = [json.loads(line) for line in reports.read().splitlines()]
    for fd in (alive, ready, go):
        os.close(fd)
    gate.close()
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    facts: dict[str, Any] = {"point": point, "runner": status, "got": [line["got"] for line in lines if "got" in line]}
    for line in lines:
        facts.update({name: line[name] for name in ("status", "error") if name in line})
    if point == "count":
        facts["counts"] = collections.Counter(names)
    return facts


def reap_within(pid: int, seconds: float) -> int:
    """As `reap`, with more patience."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    return reap(pid)


def main(victim: str, seed: int, points: list[str]) -> None:
    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for point in points:
        facts = trial(victim, seed, point)
        os.write(1, (json.dumps(facts) + "\n").encode())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
