"""Run another project's test suite against our module, and compare with what stock's module scores.

    python tools/peer_suites.py SUITE SOURCE                      # ours against the expectations
    python tools/peer_suites.py SUITE SOURCE --record             # make the expectations from a run of stock
    python tools/peer_suites.py SUITE SOURCE -k Pool --shard 1/4

SUITE is one of those in tools/peer_sources.py. SOURCE is a checkout of the project that has it, a bare repository or a
source archive, for instance what ``apt-get source --download-only pytorch`` brings; CPython's suites need none.

Exit status 1 where stock passes and ours does not, 2 where the suite is not to be had.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from peer_run import Outcome, Run, Workshop, collect, short
from peer_sources import SUITES, Suite, SuiteMissing
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

__all__ = ("compare", "main", "run_suite")


def compare(suite: Suite, expected: dict[str, str], outcomes: dict[str, Outcome], complete: bool) -> list[str]:
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
        elif suite.deviation(name) is not None:
            if outcome.status == "pass":
                worse.append(f"{name}: passes, so it is no deviation any more; strike it out in peer_sources.py")
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
        suite: Suite = options.suite
        shop = Workshop(Path(folder), suite, options.source, under_test)
        expression = " and ".join(f"({part})" for part in (suite.select, options.k) if part)
        ids = collect(shop, expression, options.shard)
        outcomes = Run(shop, options.timeout or suite.seconds, progress).run(ids, under_test)
        # The suites hold tests that measure time; on a busy machine stock fails them as well.
        failed = [one for one in ids if outcomes[short(one)].status in ("fail", "timeout")]
        again = [one for one in failed if suite.deviation(short(one)) is None]
        for one in again if options.retry else []:
            outcomes.update(Run(shop, options.timeout or suite.seconds, progress).run([one], "once more"))
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
    parser = argparse.ArgumentParser(description="Run another project's test suite against torchcrew.")
    parser.add_argument("suite", choices=SUITES, help="which one")
    parser.add_argument("source", type=Path, nargs="?", help="a checkout or archive of the project that has the suite")
    parser.add_argument("--expectations", type=Path, metavar="FILE", help="what stock scores (default: tests/peers)")
    parser.add_argument("--record", action="store_true", help="run stock and write the expectations")
    parser.add_argument("--under-test", metavar="MODULE[:CLASS]", help="what to run (default: torchcrew's)")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="only tests that match, as in pytest")
    parser.add_argument("--shard", type=parse_shard, default=(1, 1), metavar="I/N", help="every Nth test from the Ith")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="deadline of one test")
    parser.add_argument("--no-retry", dest="retry", action="store_false", help="no second try for a failing test")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write every outcome as JSON")
    options = parser.parse_args(arguments)
    options.suite = SUITES[options.suite]
    options.expectations = options.expectations or options.suite.expectations
    options.complete = not options.k and options.shard == (1, 1)
    if options.record and not options.complete:
        parser.error("--record needs the whole suite: leave -k and --shard out")
    if not options.record and not options.expectations.is_file():
        parser.error(f"no expectations at {options.expectations}: make them with --record")
    if options.timeout is not None and options.timeout <= 0:
        parser.error(f"--timeout must be positive, not {options.timeout:g}")
    return options


def show(outcomes: dict[str, Outcome], under_test: str, console: Console) -> None:
    """One table: how many of each."""
    counts = Counter(outcome.status for outcome in outcomes.values())
    table = Table("under test", "tests", "pass", "skip", "fail", "timeout", "seconds")
    figures = [len(outcomes), *(counts[status] for status in ("pass", "skip", "fail", "timeout"))]
    table.add_row(under_test, *map(str, figures), f"{sum(one.seconds for one in outcomes.values()):.0f}")
    console.print(table)


def write_json(path: Path, content: object) -> None:
    """Write ``content`` where people will read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Run, compare, report; returns the exit status."""
    options = parse(arguments)
    suite: Suite = options.suite
    console = Console()
    # Whoever runs this in the background may have it ignored, which pytest would inherit; suites send it to themselves.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # unwinds, so that pytest ends, too
    under_test = options.under_test or (suite.stock if options.record else suite.ours)
    try:
        outcomes = run_suite(options, under_test, console)
    except SuiteMissing as error:
        console.print(f"[red]{suite.name} is not to be had:[/red] {error}", highlight=False)
        return 2
    show(outcomes, under_test, console)
    if options.results:
        report = {name: asdict(one) for name, one in sorted(outcomes.items())}
        write_json(options.results, {"suite": suite.name, "under test": under_test, "tests": report})
    if options.record:
        write_json(options.expectations, as_expectations(outcomes))
        console.print(f"wrote {options.expectations}")
        return 0
    worse = compare(suite, json.loads(options.expectations.read_text()), outcomes, options.complete)
    for sentence in worse:
        console.print(f"[red]worse than stock[/red] {sentence}", highlight=False)
    console.print("nothing is worse than stock" if not worse else f"{len(worse)} worse than stock")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
