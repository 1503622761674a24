"""Run torchdata's DataLoader test suite against our class, and compare with what stock's class scores.

    this tool                                pytest, one process, restarted after a hang
    ┌──────────────────────────────┐  ids    ┌──────────────────────────────────────────┐
    │ extracts the suite           │ ──────► │ suite/test_dataloader.py (unmodified)    │
    │ writes a stand-in `torchdata`│ ◄────── │   from torchdata... import DataLoader ───┼──► class under test
    │ enforces a deadline per test │ events  │ peer_events.py: one JSON line per event  │
    └──────────────────────────────┘         └──────────────────────────────────────────┘

The suite belongs to github.com/pytorch/data and is never copied into this repository: give the path of a checkout (a
work tree, or a bare repository) and everything needed is written to a temporary folder.

    python tools/peer_suites.py PATH_OF_PYTORCH_DATA                      # ours against the expectations
    python tools/peer_suites.py PATH_OF_PYTORCH_DATA --record             # make the expectations from a run of stock
    python tools/peer_suites.py PATH_OF_PYTORCH_DATA -k Persistent --shard 1/4

Exit status 1 where stock passes and ours does not. Death: a pytest process that dies or hangs costs the test it was in;
the rest go on in a new one. This tool's own end takes pytest's process group with it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

__all__ = ("Outcome", "compare", "main", "run_suite")

ROOT = Path(__file__).resolve().parent.parent
SUITE = "test/stateful_dataloader/test_dataloader.py"
EXPECTATIONS = ROOT / "tests" / "peers" / "torchdata_dataloader.json"
OURS = "torchcrew.data:DataLoader"
STOCK = "torch.utils.data:DataLoader"

# The suite's own joins wait up to 60 s; its slowest test takes about 25 s on two idle cores.
TEST_SECONDS = 150.0
# Importing torch and the suite takes 5 s; a loaded machine may need ten times that.
START_SECONDS = 120.0
# Time between two looks at the event file: short beside any test, long beside the cost of a stat.
LOOK_SECONDS = 0.2
# A reason longer than this is cut: the whole text stands in the results.
REASON_CHARS = 160

STAND_IN = '''\
"""Stand-in for torchdata: its StatefulDataLoader is whatever class PEER_CLASS names."""
import importlib
import os

_module, _name = os.environ["PEER_CLASS"].split(":")
StatefulDataLoader = getattr(importlib.import_module(_module), _name)
'''

EVENTS_PLUGIN = '''\
"""Appends one JSON line to PEER_EVENTS for each test that starts and for each that ends."""
import json
import os


def _write(**event):
    with open(os.environ["PEER_EVENTS"], "a") as file:
        file.write(json.dumps(event) + "\\n")


def pytest_collection_finish(session):
    _write(event="collected", ids=[item.nodeid for item in session.items])


def pytest_runtest_logstart(nodeid, location):
    _write(event="start", id=nodeid)


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        reason = report.longrepr
        reason = reason[2] if isinstance(reason, tuple) else str(reason or "")
        outcome = "error" if report.when != "call" and report.failed else report.outcome
        _write(event="report", id=report.nodeid, outcome=outcome, seconds=report.duration, reason=reason)


def pytest_runtest_logfinish(nodeid, location):
    _write(event="finish", id=nodeid)
'''


@dataclass
class Outcome:
    """How one test ended: pass, skip, fail, or timeout (hung, or took its pytest process with it)."""

    status: str
    seconds: float = 0.0
    reason: str = ""

    def brief(self) -> str:
        """The last line of the reason that says something, for a table."""
        lines = [line.strip().removeprefix("E ").strip() for line in self.reason.splitlines()]
        marked = [line for line in lines if "Error" in line or "Skipped" in line]
        said = (marked or [line for line in lines if line] or [""])[-1]
        return said[:REASON_CHARS]


class Workshop:
    """A temporary folder with the suite, the stand-in package and the reporting plugin."""

    def __init__(self, folder: Path, checkout: Path, under_test: str) -> None:
        self.folder = folder
        self.suite = folder / "suite" / "test_dataloader.py"
        self.events = folder / "events.jsonl"
        stubs = folder / "stubs"
        _write(self.suite, read_suite(checkout))
        _write(stubs / "torchdata" / "__init__.py", "")
        _write(stubs / "torchdata" / "stateful_dataloader" / "__init__.py", STAND_IN)
        _write(stubs / "peer_events.py", EVENTS_PLUGIN)
        _write(folder / "pytest.ini", "[pytest]\naddopts =\n")
        paths = [str(stubs), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PEER_CLASS": under_test,
            "PEER_EVENTS": str(self.events),
        }

    def start(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        """Start pytest in its own session, so that a hang can be ended with everything it started."""
        self.events.write_text("")
        options = ["-q", "-p", "peer_events", "-p", "no:cacheprovider", "-c", str(self.folder / "pytest.ini")]
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


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def read_suite(checkout: Path) -> str:
    """The text of the suite, from a work tree or from a repository without one."""
    file = checkout / SUITE
    if file.is_file():
        return file.read_text()
    command = ["git", "-C", str(checkout), "show", f"HEAD:{SUITE}"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    if shown.returncode:
        raise ValueError(f"{checkout} holds no {SUITE}: give a checkout of github.com/pytorch/data")
    return shown.stdout


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

    def _one_process(self, ids: list[str], bar: object) -> str | None:
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

    def _take(self, event: dict[str, object], current: str | None, bar: object) -> str | None:
        """Note one event; returns the test that is running now."""
        name = short(str(event.get("id", "")))
        if event["event"] == "start":
            self.progress.update(bar, name=name)  # type: ignore[arg-type]
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

    def _advance(self, bar: object, name: str) -> None:
        self.progress.update(bar, advance=1)  # type: ignore[arg-type]
        outcome = self.outcomes.get(name)
        if outcome is not None and outcome.status in ("fail", "timeout"):
            self.progress.console.print(f"[red]{outcome.status}[/red] {name}: {outcome.brief()}", highlight=False)


def short(node: str) -> str:
    """``TestClass::test_name`` of a pytest id."""
    return node.partition("::")[2]


def compare(expected: dict[str, str], outcomes: dict[str, Outcome], complete: bool) -> list[str]:
    """Every way in which ``outcomes`` is worse than what stock scored, one sentence each.

    Args:
        expected: test name to ``pass``, ``skip: reason`` or ``stock-fails: reason``.
        outcomes: what the class under test scored.
        complete: the whole suite was meant to run, so that a missing test is a difference too.
    """
    worse = []
    for name, outcome in sorted(outcomes.items()):
        stock = expected.get(name)
        if stock is None:
            worse.append(f"{name}: not in the expectations (ours: {outcome.status}); record them again")
        elif outcome.status in ("fail", "timeout") and not stock.startswith("stock-fails"):
            worse.append(f"{name}: stock {stock}, ours {outcome.status}: {outcome.brief()}")
        elif outcome.status == "skip" and stock == "pass":
            worse.append(f"{name}: stock passes, ours skips: {outcome.brief()}")
    if complete:
        worse += [f"{name}: expected, but not run" for name in sorted(expected.keys() - outcomes.keys())]
    return worse


def as_expectations(outcomes: dict[str, Outcome]) -> dict[str, str]:
    """What a run of stock says about each test."""
    words = {"pass": "pass", "skip": "skip: ", "fail": "stock-fails: ", "timeout": "stock-fails: "}
    return {
        name: words[outcome.status] + ("" if outcome.status == "pass" else outcome.brief())
        for name, outcome in sorted(outcomes.items())
    }


def run_suite(options: argparse.Namespace, under_test: str, console: Console) -> dict[str, Outcome]:
    """Run the chosen part of the suite on ``under_test``; a failing test gets one more try, alone."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="peer-suite-") as folder,
        Progress(*columns, TextColumn("{task.fields[name]}"), console=console) as progress,
    ):
        shop = Workshop(Path(folder), options.checkout, under_test)
        ids = collect(shop, options.k, options.shard)
        outcomes = Run(shop, options.timeout, progress).run(ids, under_test)
        # The suite holds tests that measure time; on a busy machine stock fails them as well.
        again = [one for one in ids if outcomes[short(one)].status in ("fail", "timeout")]
        for one in again if options.retry else []:
            outcomes.update(Run(shop, options.timeout, progress).run([one], "once more"))
    return outcomes


def parse_shard(text: str) -> tuple[int, int]:
    """``2/4`` is the second of four shards."""
    index, _, count = text.partition("/")
    shard = int(index), int(count)
    if not 1 <= shard[0] <= shard[1]:
        raise ValueError(text)
    return shard


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Run torchdata's DataLoader suite against torchcrew's class.")
    parser.add_argument("checkout", type=Path, help="a checkout (or bare repository) of github.com/pytorch/data")
    parser.add_argument("expectations", type=Path, nargs="?", default=EXPECTATIONS, help="what stock scores")
    parser.add_argument("--record", action="store_true", help="run stock and write the expectations")
    parser.add_argument("--under-test", default=OURS, metavar="MODULE:CLASS", help="the class to run (%(default)s)")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="only tests that match, as in pytest")
    parser.add_argument("--shard", type=parse_shard, default=(1, 1), metavar="I/N", help="every Nth test from the Ith")
    parser.add_argument("--timeout", type=float, default=TEST_SECONDS, metavar="SECONDS", help="deadline of one test")
    parser.add_argument("--no-retry", dest="retry", action="store_false", help="no second try for a failing test")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write every outcome as JSON")
    options = parser.parse_args(arguments)
    options.complete = not options.k and options.shard == (1, 1)
    if options.record and not options.complete:
        parser.error("--record needs the whole suite: leave -k and --shard out")
    if not options.record and not options.expectations.is_file():
        parser.error(f"no expectations at {options.expectations}: make them with --record")
    if options.timeout <= 0:
        parser.error(f"--timeout must be positive, not {options.timeout:g}")
    return options


def show(outcomes: dict[str, Outcome], under_test: str, console: Console) -> None:
    """One table: how many of each."""
    counts = Counter(outcome.status for outcome in outcomes.values())
    table = Table("class", "tests", "pass", "skip", "fail", "timeout", "seconds")
    figures = [len(outcomes), *(counts[status] for status in ("pass", "skip", "fail", "timeout"))]
    table.add_row(under_test, *map(str, figures), f"{sum(one.seconds for one in outcomes.values()):.0f}")
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    """Run, compare, report; returns the exit status."""
    options = parse(arguments)
    console = Console()
    under_test = STOCK if options.record else options.under_test
    outcomes = run_suite(options, under_test, console)
    show(outcomes, under_test, console)
    if options.results:
        report = {"class": under_test, "tests": {name: asdict(one) for name, one in sorted(outcomes.items())}}
        _write(options.results, json.dumps(report, indent=1) + "\n")
    if options.record:
        _write(options.expectations, json.dumps(as_expectations(outcomes), indent=1) + "\n")
        console.print(f"wrote {options.expectations}")
        return 0
    worse = compare(json.loads(options.expectations.read_text()), outcomes, options.complete)
    for sentence in worse:
        console.print(f"[red]worse than stock[/red] {sentence}", highlight=False)
    console.print("nothing is worse than stock" if not worse else f"{len(worse)} worse than stock")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
