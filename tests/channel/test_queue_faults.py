"""SIGKILL of producers and consumers of a queue: at random instants, and at every system call.

Nobody is kept waiting, every message that arrives is whole and right and comes once, a killed consumer costs at most
the one message that it had taken, all memory comes back to its producer, and nothing is left.
"""

from __future__ import annotations

import collections
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.memory.test_kill_every_syscall import why_not
from torchcrew.testing.crash import run_program

PROGRAMS = Path(__file__).parent / "programs"
SEED = 5
#: Points of the default run, spread evenly over all.
SAMPLE = 4
MESSAGES = 12


def storm(seed: int, kills: int, timeout: float) -> None:
    """Kill so many, and check what was seen."""
    result = run_program(PROGRAMS / "queue_storm.py", str(seed), str(kills), timeout=timeout).check()
    facts = json.loads(result.stdout.splitlines()[-1])
    assert facts["received"] >= kills, facts
    assert facts["missing"] <= facts["consumers_killed"], facts
    wrong = {name: facts[name] for name in ("twice", "errors", "descriptors", "mappings")}
    assert not any(wrong.values()), facts
    assert facts["freed"] == 3, facts


@pytest.mark.faults  # by default `tests/multiprocessing/test_queue_deaths.py` has it, with the same mailbox
@pytest.mark.timeout(60)
def test_random_kills() -> None:
    """A short storm."""
    storm(SEED, 40, 50)


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(4))
def test_hundreds_of_random_kills(seed: int) -> None:
    """A long one."""
    storm(seed, 400, 300)


def run(victim: str, points: list[str], timeout: float) -> list[dict[str, Any]]:
    if why_not():
        pytest.skip(why_not())
    result = run_program(PROGRAMS / "queue_kill.py", victim, str(SEED), *points, timeout=timeout).check()
    return [json.loads(line) for line in result.stdout.splitlines()]


def what_is_wrong(victim: str, trial: dict[str, Any]) -> str:
    """Empty if survivors saw what they should."""
    if "error" in trial or trial["runner"] != 0:
        return "an error"
    status = trial["status"]
    was_killed = status.pop(f"{victim} 0") == -signal.SIGKILL
    if any(status.values()):
        return "a survivor failed"
    got = [tuple(pair) for pair in trial["got"]]
    if len(set(got)) < len(got):
        return "a message came twice"
    counts = collections.Counter(source for source, _ in got)
    if victim == "consumer":
        return "" if len(got) >= 2 * MESSAGES - was_killed else "more than one message is missing"
    if counts[1] != MESSAGES or not (was_killed or counts[0] == MESSAGES):
        return "messages are missing"
    numbers = sorted(number for source, number in got if source == 0)
    return "" if numbers == list(range(len(numbers))) else "a message in the middle is missing"


def check(victim: str, points: list[str], timeout: float) -> int:
    """Run the trials; returns how many victims were killed."""
    trials = run(victim, points, timeout)
    assert [trial["point"] for trial in trials] == points
    killed = sum(trial.get("status", {}).get(f"{victim} 0") == -signal.SIGKILL for trial in trials)
    wrong = [(why, trial) for trial in trials if (why := what_is_wrong(victim, trial))]
    assert not wrong, json.dumps(wrong, indent=2)
    return killed


def all_points(victim: str) -> list[str]:
    """One for every system call that the victim makes when it is let be, and one beyond the last of each name."""
    [trial] = run(victim, ["count"], 60)
    assert not what_is_wrong(victim, trial), trial
    return [f"{name}:{n}" for name, count in sorted(trial["counts"].items()) for n in range(1, count + 2)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("victim", [pytest.param("producer", marks=pytest.mark.faults), "consumer"])
def test_killed_at_some_system_calls(victim: str) -> None:
    """A few of all points."""
    points = all_points(victim)
    killed = check(victim, points[1 :: max(1, len(points) // SAMPLE)], 50)
    assert killed >= 1


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["producer", "consumer"])
def test_killed_at_every_system_call(victim: str) -> None:
    """All of them; how often the victim looks and naps differs from run to run, so that some are never reached."""
    points = all_points(victim)
    killed = check(victim, points, 850)
    assert killed >= len(points) // 2
