"""Runs tests in as many pytest processes as hangs and crashes make necessary, and notes how each test ended.

    this process                             pytest, one process, restarted after a hang
    ┌──────────────────────────────┐  ids    ┌──────────────────────────────────────────────┐
    │ writes the suite             │ ──────► │ suite/test_x.py (unmodified)                 │
    │ enforces a deadline per test │ ◄────── │   sitecustomize.py: what it imports is ours ─┼──► processes under test
    └──────────────────────────────┘ events  │ peer_events.py: one JSON line per event      │
                                             └──────────────────────────────────────────────┘

Death: a pytest process that dies or hangs costs the test it was in; the rest go on in a new one. This process's own end
takes pytest's process group with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from peer_sources import ROOT, SWAP, Suite
from rich.progress import Progress, TaskID

__all__ = ("Outcome", "Run", "Workshop", "collect", "short")

# Importing torch and a suite takes 5 s; a loaded machine may need ten times that.
START_SECONDS = 120.0
# Time between two looks at the event file: short beside any test, long beside the cost of a stat.
LOOK_SECONDS = 0.2
# A reason longer than this is cut: the whole text stands in the results.
REASON_CHARS = 160


@dataclass
class Outcome:
    """How one test ended: pass, skip, fail, or timeout (hung, or took its pytest process with it)."""

    status: str
    seconds: float = 0.0
    reason: str = ""

    def brief(self) -> str:
        """The last line of the reason that says something, for a table."""
        lines = [line.strip() for line in self.reason.splitlines() if line.strip()]
        # pytest puts an E before the lines of the exception itself.
        errors = [line.removeprefix("E ").strip() for line in lines if line.startswith("E ") and "Error" in line]
        said = (errors or [line for line in lines if "Skipped" in line] or lines or [""])[-1]
        return said[:REASON_CHARS]


class Workshop:
    """A temporary folder with the suite, and the environment that points it at what is under test."""

    def __init__(self, folder: Path, suite: Suite, source: Path | None, under_test: str) -> None:
        self.folder = folder
        self.suite = suite.write(folder, source, under_test)
        self.events = folder / "events.jsonl"
        (folder / "pytest.ini").write_text("[pytest]\naddopts =\n")
        paths = [str(SWAP), str(self.suite.parent), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PEER_EVENTS": str(self.events),
            **suite.environment(under_test),
        }

    def start(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        """Start pytest in its own session, so that a hang can be ended with everything it started."""
        self.events.write_text("")
        # Not rewriting assertions leaves the suite to the ordinary import system, which is what is redirected.
        options = ["-q", "--assert=plain", "-p", "peer_events", "-p", "no:cacheprovider"]
        options += ["-c", str(self.folder / "pytest.ini")]
        with (self.folder / "log.txt").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *arguments],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def read_events(self) -> list[dict[str, object]]:
        """Every complete event line so far."""
        text = self.events.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def log(self) -> str:
        """The end of what pytest printed."""
        return (self.folder / "log.txt").read_text(errors="replace")[-4000:]


@contextlib.contextmanager
def running(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Whatever happens inside, nothing of the process's group is left afterwards."""
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def collect(shop: Workshop, expression: str, shard: tuple[int, int]) -> list[str]:
    """The ids of the tests that ``-k expression`` and the shard leave."""
    chosen = ["-k", expression] if expression else []
    with running(shop.start(["--collect-only", *chosen, str(shop.suite)])) as process:
        process.wait(timeout=START_SECONDS)
        collected = [event["ids"] for event in shop.read_events() if event["event"] == "collected"]
    if process.returncode not in (0, 5) or not collected:
        raise RuntimeError(f"the suite could not be collected:\n{shop.log()}")
    ids = collected[-1]
    assert isinstance(ids, list)
    index, count = shard
    return [str(one) for one in ids[index - 1 :: count]]


class Run:
    """Runs a list of tests, in as many pytest processes as hangs and crashes make necessary."""

    def __init__(self, shop: Workshop, seconds: float, progress: Progress) -> None:
        self.shop, self.seconds, self.progress = shop, seconds, progress
        self.outcomes: dict[str, Outcome] = {}

    def run(self, ids: list[str], label: str) -> dict[str, Outcome]:
        """Run every test of ``ids``; returns their outcomes by short name."""
        bar = self.progress.add_task(label, total=len(ids), name="")
        left = list(ids)
        while left:
            before = len(left)
            culprit = self._one_process(left, bar)
            left = [one for one in left if short(one) not in self.outcomes]
            if culprit is None and len(left) == before:
                raise RuntimeError(f"pytest ended without running a test:\n{self.shop.log()}")
        self.progress.remove_task(bar)
        return self.outcomes

    def _one_process(self, ids: list[str], bar: TaskID) -> str | None:
        """Run until the end, a hang or a crash; returns the test that hung or crashed."""
        listing = self.shop.folder / "ids.txt"
        listing.write_text("\n".join(ids))
        current: str | None = None
        seen, since, deadline = 0, time.monotonic(), START_SECONDS
        with running(self.shop.start([f"@{listing}"])) as process:
            while True:
                ended = process.poll() is not None
                events = self.shop.read_events()
                for event in events[seen:]:
                    current = self._take(event, current, bar)
                    since, deadline = time.monotonic(), self.seconds
                seen = len(events)
                if ended or time.monotonic() - since > deadline:
                    break
                time.sleep(LOOK_SECONDS)
        if current is not None:
            how = f"pytest ended with status {process.returncode}" if ended else f"no end within {deadline:.0f} s"
            self.outcomes[current] = Outcome("timeout", time.monotonic() - since, how)
            self._advance(bar, current)
        return current

    def _take(self, event: dict[str, object], current: str | None, bar: TaskID) -> str | None:
        """Note one event; returns the test that is running now."""
        name = short(str(event.get("id", "")))
        if event["event"] == "start":
            self.progress.update(bar, name=name)
            return name
        if event["event"] == "report":
            status = {"passed": "pass", "skipped": "skip"}.get(str(event["outcome"]), "fail")
            known = self.outcomes.get(name)
            if known is None or known.status == "pass":  # a failing teardown overrules a passing call
                self.outcomes[name] = Outcome(status, float(str(event["seconds"])), str(event["reason"]))
        if event["event"] == "finish":
            self._advance(bar, name)
            return None
        return current

    def _advance(self, bar: TaskID, name: str) -> None:
        self.progress.update(bar, advance=1)
        outcome = self.outcomes.get(name)
        if outcome is not None and outcome.status in ("fail", "timeout"):
            self.progress.console.print(f"[red]{outcome.status}[/red] {name}: {outcome.brief()}", highlight=False)


def short(node: str) -> str:
    """``TestClass::test_name`` of a pytest id."""
    return node.partition("::")[2]
