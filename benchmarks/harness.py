"""What all benchmarks share: timing, alternation, the check that batches are equal, and the report.

Alternation  Every repeat runs each engine once, in an order that rotates, so that a machine that gets slower or faster
             meets all of them. A figure is the median over the repeats; smallest and largest stand beside it. The ratio
             is that of the medians.
Time a batch From the arrival of the first batch to that of the last, divided by the batches between. Start and end of
             the workers are not in it (`first_batch` measures the start); the JSON has the whole epoch as well. The
             consumer reads nothing, which is in stock's favour: its pages are mapped anew for every batch. Beside it
             stands the CPU time a batch of all processes, start and end of workers included, which other work on the
             machine disturbs less (not for SPDL, whose process lives on).
Equal        Every engine runs one more epoch before the timed ones and one after them, in which every batch is hashed
             (types, dtypes, shapes, bytes) and compared with stock's. Hashing is never inside a timed epoch.
Floor        What no loader beats: a copy of the same bytes by all cores, or the same work in-process with
             ``num_workers=0``. The share is the floor's time through ours.
Machine      Cores, versions, date, load average and what others took of the processors just before, in the JSON. A
             busy machine gets a warning; nothing is refused.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import gc
import hashlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from rich.console import Console

__all__ = (
    "COPY",
    "IN_PROCESS",
    "OURS",
    "STOCK",
    "Benchmark",
    "Claim",
    "Row",
    "alternate",
    "compare",
    "console",
    "digest",
    "median_seconds",
    "ratio",
    "run_child",
    "run_epochs",
    "summary",
    "time_copy",
    "time_epoch",
    "verdict",
    "verify",
)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
REPEATS = 7
#: Seconds after which a benchmark prints where it stands and ends: nothing here waits for ever.
WATCHDOG = 1500
#: Load average, and share of the processors that others take, above which figures are not to be trusted.
BUSY_LOAD, BUSY_SHARE = 0.5, 0.05

STOCK, OURS, IN_PROCESS, COPY = "stock", "torchcrew", "in-process", "memory copy"

console = Console(highlight=False)

#: One run of one engine: figures by name, such as ``{"batch_s": 0.0013, "first_s": 0.02}``.
Measurement = dict[str, float]


# Measuring ------------------------------------------------------------------------------------------------------------


def time_epoch(loader: Iterable[Any]) -> Measurement:
    """Run one epoch; the loader (not yet iterated) makes its iterator and workers inside the timed part."""
    gc.collect()
    batches = 0
    cpu_before = _cpu_seconds()
    started = time.perf_counter()
    iterator = iter(loader)
    batch = next(iterator)
    first = last = time.perf_counter()
    for batch in iterator:  # noqa: B007 - a batch is held until the next one is there, as in training
        last = time.perf_counter()
        batches += 1
    del batch, iterator
    ended = time.perf_counter()
    return {
        "batch_s": (last - first) / batches,
        "first_s": first - started,
        "epoch_s": ended - started,
        "cpu_s": (_cpu_seconds() - cpu_before) / (batches + 1),
    }


def _cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended: workers are reaped when their epoch ends."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def time_copy(nbytes: int, *, times: int = 30) -> float:
    """Seconds that all cores together need to copy ``nbytes`` from warm memory to warm memory, once."""
    # Written, both: zeros that nobody wrote are one and the same page for the kernel.
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def alternate(engines: Mapping[str, Callable[[], Measurement]], repeats: int) -> dict[str, list[Measurement]]:
    """Run every engine ``repeats`` times, in an order that rotates from one repeat to the next."""
    names = list(engines)
    measured: dict[str, list[Measurement]] = {name: [] for name in names}
    for repeat in range(repeats):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            with console.status(f"repeat {repeat + 1} of {repeats}: {name}"):
                measured[name].append(engines[name]())
    return measured


# Checking -------------------------------------------------------------------------------------------------------------


def median_seconds(step: Callable[[], object], before: int, timed: int) -> float:
    """What a step takes, of ``timed`` ones behind ``before`` others."""
    seconds = []
    for _ in range(before + timed):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[before:])


def digest(batch: Any) -> str:
    """Hash a batch: container types, keys, dtypes, shapes and every byte."""
    state = hashlib.blake2b(digest_size=16)
    _feed(state, batch)
    return state.hexdigest()


def _feed(state: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        state.update(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        state.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, numpy.ndarray):
        state.update(f"array {value.dtype} {value.shape}".encode())
        state.update(numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8))
    elif isinstance(value, Mapping):
        state.update(f"{type(value).__name__} {len(value)}".encode())
        for key, item in value.items():
            state.update(repr(key).encode())
            _feed(state, item)
    elif isinstance(value, (list, tuple)):
        state.update(f"{type(value).__name__} {len(value)}".encode())
        for item in value:
            _feed(state, item)
    else:
        state.update(f"{type(value).__name__} {value!r}".encode())


def verify(loaders: Mapping[str, Callable[[], Iterable[Any]]], *, epochs: int = 1) -> dict[str, Any]:
    """Run epochs of each and compare every batch with stock's.

    Raises:
        SystemExit: a batch differs; there is no point in timing wrong results.
    """
    wanted: list[str] = []
    for name, make in loaders.items():
        with console.status(f"hashing every batch of {name}"):
            loader = make()
            found = [digest(batch) for _ in range(epochs) for batch in loader]
        wanted = wanted or found  # stock is the first
        compare(name, found, wanted)
    return verdict(list(loaders), wanted)


def verdict(engines: Sequence[str], digests: Sequence[str]) -> dict[str, Any]:
    """What the JSON says of batches that were compared: how many, whose, and one digest for all of them."""
    whole = hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest()
    return {"batches": len(digests), "engines": list(engines), "digest": whole, "equal": True}


def run_epochs(
    loaders: Mapping[str, Callable[[], Iterable[Any]]],
    repeats: int,
    extra: Mapping[str, Callable[[], Measurement]] | None = None,
) -> tuple[dict[str, list[Measurement]], dict[str, Any]]:
    """Check, time alternating whole epochs, check again: the way of most benchmarks.

    Args:
        loaders: makes a new loader of each engine, stock first.
        extra: floors that are no loaders, measured in turn with them.
    """
    before = verify(loaders)
    timed = {name: partial(_time_new, make) for name, make in loaders.items()}
    measured = alternate({**timed, **(extra or {})}, repeats)
    after = verify(loaders)
    return measured, {**after, "batches": before["batches"] + after["batches"]}


def _time_new(make: Callable[[], Iterable[Any]]) -> Measurement:
    return time_epoch(make())


def compare(name: str, found: Sequence[str], wanted: Sequence[str]) -> None:
    """Compare the digests of one engine's batches with stock's.

    Raises:
        SystemExit: they differ.
    """
    if list(found) != list(wanted):
        different = [k for k, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b]
        sys.exit(f"{name}: {len(found)} batches for {len(wanted)}; other bytes than stock in {different[:10]}")


# Reporting ------------------------------------------------------------------------------------------------------------


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, smallest, largest, and the values themselves in the order in which they were measured."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "values": list(values)}


@dataclass(frozen=True)
class Claim:
    """What a row must reach: a ratio to another engine, or a value not to be exceeded."""

    text: str
    against: str = STOCK
    at_least: float | None = None
    at_most: float | None = None

    def judge(self, row: Row) -> dict[str, Any]:
        """The claim with what was measured; ``reached`` is None where the other engine was not there."""
        measured: float | None
        if self.at_most is not None:
            measured = row.median(OURS)
            reached = measured is not None and measured <= self.at_most
        else:
            measured = ratio(row, self.against)
            reached = measured is not None and self.at_least is not None and measured >= self.at_least
        target = self.at_least if self.at_most is None else self.at_most
        verdict = None if measured is None else reached
        return {"text": self.text, "target": target, "measured": measured, "reached": verdict}


@dataclass
class Row:
    """One line of the table: the same work on several engines."""

    key: str
    work: str
    metric: str
    """Which figure of the measurements the row is about. Names end in ``_s`` (seconds) or ``_bytes``."""
    per: str
    measured: Mapping[str, Sequence[Measurement]]
    claims: Sequence[Claim] = ()
    floor: str | None = None
    """The engine, measured beside the others, that is the floor."""
    verified: Mapping[str, Any] | None = None
    notes: Sequence[str] = ()
    more: Mapping[str, Any] = field(default_factory=dict)

    def median(self, engine: str) -> float | None:
        """The row's figure for one engine; None where that was not measured."""
        runs = self.measured.get(engine)
        return statistics.median(run[self.metric] for run in runs) if runs else None

    def as_json(self) -> dict[str, Any]:
        """The row as it stands in the file."""
        figures = {
            engine: {metric: summary([run[metric] for run in runs]) for metric in runs[0]}
            for engine, runs in self.measured.items()
        }
        return {
            "key": self.key,
            "work": self.work,
            "metric": self.metric,
            "per": self.per,
            "figures": figures,
            "ratio": ratio(self, STOCK),
            "floor": self.floor,
            "floor_share": None if self.floor is None else ratio(self, self.floor),
            "claims": [claim.judge(self) for claim in self.claims] + list(self.more.get("claims", ())),
            "verified": self.verified,
            "notes": list(self.notes),
            **{name: value for name, value in self.more.items() if name != "claims"},
        }


def ratio(row: Row, against: str) -> float | None:
    """How many times less ours takes than ``against``; None where one of the two was not measured."""
    other, ours = row.median(against), row.median(OURS)
    return other / ours if other and ours else None


class Benchmark:
    """One benchmark's command line, rows, JSON file and table."""

    def __init__(self, name: str, doc: str, *, arguments: Sequence[str] | None = None) -> None:
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc.splitlines()[0])
        parser.add_argument("--repeats", type=int, default=REPEATS, help="runs of each engine (results: at least 5)")
        parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
        options = parser.parse_args(arguments)
        self.name = name
        self.repeats: int = max(1, options.repeats)
        self._out: Path = options.out
        self._rows: list[Row] = []
        self._machine = machine_facts()
        faulthandler.dump_traceback_later(WATCHDOG, exit=True)
        load, share = self._machine["load_before"][0], self._machine["others_share_before"]
        if load > BUSY_LOAD or share > BUSY_SHARE:
            console.print(
                f"[bold yellow]Warning:[/] other work is running (load average {load:.2f}, {share:.0%} of the "
                "processors): these figures are no results."
            )

    def add(self, row: Row) -> None:
        """Take a finished row."""
        self._rows.append(row)

    def finish(self) -> None:
        """Write the JSON, print the table."""
        from benchmarks.tables import print_table

        faulthandler.cancel_dump_traceback_later()
        result = {
            "benchmark": self.name,
            "repeats": self.repeats,
            "machine": {**self._machine, "load_after": list(os.getloadavg())},
            "rows": [row.as_json() for row in self._rows],
        }
        self._out.mkdir(parents=True, exist_ok=True)
        (self._out / f"{self.name}.json").write_text(json.dumps(result, indent=1) + "\n")
        print_table(result, console)


def machine_facts() -> dict[str, Any]:
    """What a reader of the figures has to know of the machine."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "torch_threads": torch.get_num_threads(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "load_before": list(os.getloadavg()),
        "others_share_before": _others_share(),
    }


def _processor() -> str:
    with open("/proc/cpuinfo") as lines:
        return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _others_share(seconds: float = 0.5) -> float:
    """Share of all processors that was busy while this process slept."""

    def read() -> tuple[int, int]:
        with open("/proc/stat") as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]
        return sum(ticks), ticks[3] + ticks[4]  # idle and waiting for a disk

    total_before, idle_before = read()
    time.sleep(seconds)
    total, idle = read()
    return round(1 - (idle - idle_before) / max(total - total_before, 1), 3)


def run_child(module: str, *arguments: str, timeout: float) -> dict[str, Any]:
    """Run ``python -m MODULE --child ARGUMENTS`` and return the JSON object in its last line.

    Raises:
        SystemExit: it failed.
    """
    command = [sys.executable, "-m", module, "--child", *arguments]
    done = subprocess.run(command, cwd=ROOT, timeout=timeout, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
