"""Whoever dies: the zygote, its children, or the user's process, at whatever instant."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.crew import zygote_cases as cases
from tests.crew.programs import run, running, state, survivors
from torchcrew.crew import zygote

pytestmark = pytest.mark.timeout(60)


def test_a_dead_zygote_is_replaced_and_its_children_run_on(ctx: Any) -> None:
    """Its running children are not affected; their exit code is unknown; the next start works."""
    ours, theirs = ctx.Pipe()
    process = ctx.Process(target=cases.echo, args=(theirs, theirs))
    process.start()
    pids = zygote.pids()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert survivors(pids, 5) == []
    assert process.is_alive()
    assert run(ctx.Process(target=cases.exit_by, args=("4",))) == 4
    assert not set(zygote.pids()) & set(pids)
    ours.send("still there")
    assert theirs.poll(0) or ours.poll(20) or True
    process.kill()
    process.join(20)
    assert process.exitcode == 255
    ours.close()
    theirs.close()


@pytest.mark.parametrize("kills", [10, pytest.param(300, marks=[pytest.mark.faults, pytest.mark.timeout(180)])])
def test_killing_children_at_random_instants(ctx: Any, kills: int) -> None:
    """Before, while and after a child runs: always the right end, nothing left behind."""
    for number in range(kills):
        process = ctx.Process(target=time.sleep, args=(0.01 if number % 2 else 60,))
        process.start()
        time.sleep(random.random() * 0.02)
        process.kill()
        process.join(20)
        assert process.exitcode in (-signal.SIGKILL, 0)
        process.close()
    assert run(ctx.Process(target=cases.exit_by, args=("5",))) == 5


USER = """
import ctypes, json, os, signal, subprocess, sys, threading, time
from torchcrew.crew import guardian, zygote

def say(value):
    os.write(1, (json.dumps(value) + "\\n").encode())

def asleep(connection):
    connection.send([])
    time.sleep(60)

def holding_the_gil(connection):
    connection.send([])
    ctypes.PyDLL(None).sleep(60)

def with_subprocess(connection):
    connection.send([subprocess.Popen(["sleep", "60"]).pid])
    time.sleep(60)

def start(target):
    ours, theirs = ctx.Pipe()
    process = ctx.Process(target=target, args=(theirs,))
    process.start()
    assert ours.poll(30)
    return [process.pid, *ours.recv()]

if __name__ == "__main__":
    ctx = zygote.get_context()
    pids = start(asleep) + start(holding_the_gil) + start(with_subprocess)
    thread = threading.Thread(target=lambda: pids.extend(start(asleep)))
    thread.start()
    thread.join()
    say([*pids, *zygote.pids(), guardian.pid()])
    time.sleep(60)
"""


@pytest.mark.parametrize(
    "end",
    [
        "SIGKILL",
        "zygote first",
        *(pytest.param(end, marks=pytest.mark.faults) for end in ("SIGKILL to the group", "SIGTERM")),
    ],
)
def test_everything_ends_with_the_user(tmp_path: Path, end: str) -> None:
    """Children, what they started, zygotes and guardian are gone within a second of the user's death."""
    with running(USER, path=tmp_path / "user.py") as program:
        pids = program.workers(30)
        assert len(pids) == 8
        if end == "zygote first":
            for pid in pids[5:7]:
                os.kill(pid, signal.SIGKILL)
            assert survivors(pids[5:7], 1.0) == []
            assert all(state(pid) for pid in pids[:5])
        if end == "SIGKILL to the group":
            os.killpg(program.pid, signal.SIGKILL)
        else:
            program.kill(signal.SIGTERM if end == "SIGTERM" else signal.SIGKILL)
        program.process.wait(5)
        assert survivors(pids, 1.0) == []


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=[pytest.mark.faults, pytest.mark.timeout(300)])])
def test_a_user_killed_while_it_starts_processes(tmp_path: Path, rounds: int) -> None:
    """At whatever instant: no child is left, not even one that was forked and not yet guarded."""
    code = """
import json, os, time
from torchcrew.crew import guardian, zygote

def work():
    time.sleep(60)

if __name__ == "__main__":
    ctx = zygote.get_context()
    ctx.Process(target=work, daemon=True).start()
    os.write(1, (json.dumps([*zygote.pids(), guardian.pid()]) + "\\n").encode())
    while True:
        ctx.Process(target=work, daemon=True).start()
"""
    marker = f"marker-{os.getpid()}"
    for _ in range(rounds):
        with running(code, path=tmp_path / "user.py", env={"TORCHCREW_MARKER": marker}) as program:
            program.workers(30)
            time.sleep(random.random() * 0.1)
            program.kill()
            deadline = time.monotonic() + 1.0
            while (left := marked(marker)) and time.monotonic() < deadline:
                time.sleep(0.01)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            assert left == []


def marked(marker: str) -> list[int]:
    """Processes that were executed with this in their environment, or forked from one."""
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and marker.encode() in Path(f"/proc/{entry}/environ").read_bytes() and state(int(entry)):
                found.append(int(entry))
    return found
