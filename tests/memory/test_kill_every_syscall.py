"""SIGKILL at every system call of a producer or a consumer: nobody waits, no byte is wrong, nothing is left.

Debian's strace delivers the signal when the N-th call of a name is entered, so that between them all points cover every
state that the kernel can see a process in. The program under test is `programs/relay.py`.
"""

from __future__ import annotations

import functools
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchcrew.testing.crash import run_program

PROGRAM = Path(__file__).parent / "programs" / "relay.py"
SEED = 3
#: Points of the default run, spread evenly over all.
SAMPLE = 6


@functools.cache
def why_not() -> str:
    """Why processes cannot be traced here; empty when they can."""
    if sys.platform != "linux" or shutil.which("strace") is None:
        return "strace is not installed"
    with subprocess.Popen(["sleep", "20"]) as sleeper:
        command = ["timeout", "5", "strace", "-o", "/dev/null", "-e", "inject=all:signal=KILL", "-p", str(sleeper.pid)]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as strace:
            assert strace.stderr is not None
            said = strace.stderr.readline().decode()
            sleeper.kill()
    return "" if "attached" in said else f"strace cannot attach to a process here: {said.strip()}"


@pytest.fixture(autouse=True)
def _traceable() -> None:
    if why_not():
        pytest.skip(why_not())


def run(victim: str, points: list[str], timeout: float) -> list[dict[str, Any]]:
    result = run_program(PROGRAM, victim, str(SEED), *points, timeout=timeout).check()
    return [json.loads(line) for line in result.stdout.splitlines()]


def check(victim: str, points: list[str], timeout: float) -> int:
    """Run the trials; returns how many victims were killed."""
    trials = run(victim, points, timeout)
    assert [trial["point"] for trial in trials] == points
    wrong = [trial for trial in trials if not is_right(victim, trial)]
    assert not wrong, json.dumps(wrong, indent=2)
    return sum(-signal.SIGKILL in (trial["consumer"], trial.get("producer")) for trial in trials)


def is_right(victim: str, trial: dict[str, Any]) -> bool:
    """Whether the survivor saw what it should: the last call may come after everything was done."""
    if "error" in trial:
        return False
    if victim == "producer":
        return trial["consumer"] == 0 and trial["producer"] in (0, -signal.SIGKILL)
    return trial["consumer"] in (0, -signal.SIGKILL)


def all_points(victim: str) -> list[str]:
    """One for every system call that the victim makes when it is let be, and one beyond the last of each name."""
    [trial] = run(victim, ["count"], 60)
    assert is_right(victim, trial), trial
    assert trial["received"] == 12
    return [f"{name}:{n}" for name, count in sorted(trial["counts"].items()) for n in range(1, count + 2)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("victim", ["producer", pytest.param("consumer", marks=pytest.mark.faults)])
def test_killed_at_some_system_calls(victim: str) -> None:
    """A few of all points."""
    points = all_points(victim)
    killed = check(victim, points[:: max(1, len(points) // SAMPLE)], 40)
    assert killed >= SAMPLE // 2


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["producer", "consumer"])
def test_killed_at_every_system_call(victim: str) -> None:
    """All of them."""
    points = all_points(victim)
    killed = check(victim, points, 800)
    assert killed >= len(points) * 3 // 4
