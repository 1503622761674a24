"""The table of failures many times at random instants, and processes killed at random instants of a job's life.

The medians of what was measured are printed at the end, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest

import torchcrew
from tests.launcher import failure_cases as cases
from tests.launcher import failure_cells as cells
from torchcrew.crew import guardian, zygote
from torchcrew.errors import RankDied
from torchcrew.testing import procfs

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("_no_stack_dumps")]

TIMES = 20
#: Longest delay between the moment when all are where they shall be and the failure, in seconds.
DELAY = 0.2
#: Kills at random instants: of ranks, of guardians; of zygotes, each of which costs the start of another; of launchers,
#: which start in a tenth of a second ("fork") or in seconds ("zygote").
RANKS, GUARDIANS, ZYGOTES = 300, 100, 20
LAUNCHERS = (("fork", 150, 0.6), ("zygote", 20, 5.0))

#: The names of its semaphores are the standard library's matter, whose tracker for them may be killed with the rank.
_leaves_semaphores = partial(
    pytest.param, marks=pytest.mark.leaks_allowed(reason="semaphores of a killed rank, if its tracker dies first")
)

Times = dict[str, list[cells.Measured]]


@pytest.fixture(scope="module")
def times(request: pytest.FixtureRequest) -> Iterator[Times]:
    """What was measured by cell."""
    measured: Times = defaultdict(list)
    yield measured
    table = {
        cell: {
            "count": len(rows),
            "raised median": _rounded([row.raised for row in rows], statistics.median),
            "raised max": _rounded([row.raised for row in rows], max),
            "dead median": _rounded([row.dead for row in rows], statistics.median),
            "dead max": _rounded([row.dead for row in rows], max),
        }
        for cell, rows in measured.items()
    }
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture is not None else contextlib.nullcontext():
        reporter.write_line("")
        for cell, row in table.items():
            reporter.write_line(json.dumps({"cell": cell, **row}))


def _rounded(values: list[float], of: object) -> float | None:
    known = [value for value in values if value == value]
    return round(of(known), 3) if known else None  # type: ignore[operator]


def add(times: Times, what: str, measured: Mapping[str, cells.Measured]) -> None:
    for peer, one in measured.items():
        times[f"{what} x {peer}"].append(one)


@pytest.mark.parametrize("how", cases.FAILURES)
@pytest.mark.parametrize("peer", [*cases.FAST_PEERS, *map(_leaves_semaphores, cases.SLOW_PEERS)])
def test_a_rank_fails(how: str, peer: str, tmp_path: Path, times: Times) -> None:
    """Peers blocked in whatever way end with it."""
    for number in range(TIMES):
        folder = tmp_path / str(number)
        folder.mkdir()
        add(times, how, {peer: cells.rank_fails(folder, peer, how, random.uniform(0, DELAY))})


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_the_launcher_dies(signum: signal.Signals, tmp_path: Path, times: Times) -> None:
    """Nothing below it lives on."""
    for number in range(TIMES):
        dead = cells.launcher_dies(tmp_path / str(number), cases.PEERS, signum, random.uniform(0, DELAY))
        add(times, f"launcher {signum.name}", {peer: cells.Measured(float("nan"), one) for peer, one in dead.items()})


def test_the_launcher_is_interrupted(tmp_path: Path, times: Times) -> None:
    """One KeyboardInterrupt."""
    for number in range(TIMES):
        measured = cells.launcher_is_interrupted(tmp_path / str(number), cases.PEERS, random.uniform(0, DELAY))
        add(times, "launcher SIGINT", measured)


def test_the_zygote_dies(tmp_path: Path, times: Times) -> None:
    """Jobs go on, and fail as others do."""
    for number in range(TIMES):
        measured = cells.zygote_dies(tmp_path / str(number), cases.PEERS, delay=random.uniform(0, DELAY))
        add(times, "zygote SIGKILL, then raises", measured)


# Random instants ------------------------------------------------------------------------------------------------------


def kill(pid: int, signum: int = signal.SIGKILL) -> bool:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True


class Killer(threading.Thread):
    """Kills one rank, which is what a zygote has forked, at some instant from now on."""

    def __init__(self, after: float) -> None:
        super().__init__(daemon=True)
        self.after = after
        self.zygotes = set(zygote.pids())
        self.over = threading.Event()
        self.killed: int | None = None

    def run(self) -> None:
        """Wait for that instant, and for a rank, which is killed."""
        self.over.wait(self.after)
        while not self.over.is_set():
            family = procfs.descendants(os.getpid())
            ranks = [info.pid for info in family if info.parent in self.zygotes and info.pid not in self.zygotes]
            if ranks and kill(victim := random.choice(ranks)):
                self.killed = victim
                return
            time.sleep(0.001)


def test_ranks_killed_at_random_instants() -> None:
    """While they start, run or close: the right values, or an error that names the one that was killed."""
    torchcrew.launch(cases.add_up, nprocs=2)
    seen: Counter[object] = Counter()
    for _ in range(RANKS):
        killer = Killer(random.uniform(0, 0.15))
        killer.start()
        try:
            outcome = cells.outcome_of(lambda: seen.update(torchcrew.launch(cases.add_up, 0.02, nprocs=2)))
        finally:
            killer.over.set()
            killer.join()
        if outcome.kind:
            assert outcome.kind == RankDied.__name__, outcome
            assert outcome.cause is not None
            assert (outcome.cause.pid, outcome.cause.signal) == (killer.killed, "SIGKILL"), outcome
            seen["killed"] += 1
    assert seen.keys() <= {3, "killed"}, "a sum was wrong"
    assert seen["killed"] > RANKS / 10, seen


def test_guardians_killed_at_random_instants() -> None:
    """Nobody notices."""
    for _ in range(GUARDIANS):
        pid = guardian.pid()
        timer = threading.Timer(random.uniform(0, 0.15), lambda pid=pid: pid is not None and kill(pid))
        timer.start()
        try:
            assert torchcrew.launch(cases.add_up, 0.02, nprocs=2) == [3, 3]
        finally:
            timer.join()
    assert torchcrew.launch(cases.add_up, nprocs=2) == [3, 3]  # has the last one reaped


def test_zygotes_killed_at_random_instants() -> None:
    """While they start, fork, or have nothing to do: the next one takes over."""
    for number in range(ZYGOTES):
        pids = zygote.pids()
        timer = threading.Timer(random.uniform(0, 0.15), lambda pids=pids: [kill(pid) for pid in pids])
        timer.start()
        try:
            for _ in range(2 if number % 2 else 1):
                assert torchcrew.launch(cases.add_up, 0.02, nprocs=2) == [3, 3]
        finally:
            timer.join()
    assert torchcrew.launch(cases.add_up, nprocs=2) == [3, 3]  # has the last one reaped


# Not SIGINT for "fork": Python itself loses one that comes during a fork, in a process with hooks for that.
@pytest.mark.parametrize(
    ("method", "count", "longest", "signum"),
    [*((*launcher, signal.SIGKILL) for launcher in LAUNCHERS), (*LAUNCHERS[-1], signal.SIGINT)],
)
def test_launchers_killed_at_random_instants(
    method: str, count: int, longest: float, signum: signal.Signals, tmp_path: Path
) -> None:
    """While they start their first ranks, run jobs, close them: nothing of theirs is left."""
    with cells.program("many", tmp_path / "jobs", method=method) as server:
        for _ in range(count):
            launcher = server.fork()
            time.sleep(random.uniform(0, longest))
            since = time.monotonic()
            assert kill(launcher, signum), server.stderr.read_text()
            # An interpreter that ends by itself frees all of torch's objects first, which may take seconds.
            server.wait_until_alone(since, cells.PROMISE if signum == signal.SIGKILL else 15.0)
        assert server.finish() == 0
        if signum == signal.SIGINT:
            check_interrupts(server.stderr.read_text())


def check_interrupts(errors: str) -> None:
    """Nothing but KeyboardInterrupts was told, one for each launcher."""
    ends = re.findall(r"^(?!\s|Traceback)(.+)", errors, re.MULTILINE)
    assert set(ends) <= {"KeyboardInterrupt"}, errors
    assert errors.count("Traceback") == len(ends), errors
