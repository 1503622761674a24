"""The demo's runs: each in a fresh child process, watched from here.

    this process                                child: python -m torchcrew.cli.demo_train
      reads events (deadline between two) ◄──── stdout
      samples memory (thread), if asked   ────► /proc of the child and its workers

Sampling PSS every 50 ms takes a good part of a core: memory has short runs of its own, the clocks run without it.

Death      child dies: EOF, and `RunFailed` with the end of its stderr. This process dies: the child's next event meets
           a closed pipe and ends it, and its loaders end their workers.
"""

from __future__ import annotations

import json
import os
import selectors
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from torchcrew.cli.demo_memory import PssSampler

__all__ = ("ENGINES", "EngineSummary", "Run", "RunFailed", "as_json", "run_once", "same_results", "summarise")

ENGINES = ("stock", "torchcrew")
SILENCE_S = 60.0
"""Longest time without an event before a run is given up; the longest is the start: torch's import on a busy disk."""
STDERR_TAIL = 2000
"""Characters of a failed run's stderr that are shown."""


class RunFailed(RuntimeError):
    """A training run ended without a result; the message has the end of what it wrote to stderr."""


@dataclass(frozen=True)
class Run:
    """One finished run: its result (`demo_train.RunResult` as a dict) and its memory."""

    engine: str
    result: dict[str, Any]
    memory: list[tuple[float, int]]
    """(seconds since training began, bytes of all processes) while it trained; empty in the runs for time."""

    @property
    def images_per_s(self) -> float:
        return float(self.result["images"] / self.result["train_s"])

    @property
    def wait_share(self) -> float:
        return float(self.result["wait_s"] / self.result["train_s"])

    @property
    def peak_bytes(self) -> int:
        return max((size for _, size in self.memory), default=0)


@dataclass(frozen=True)
class EngineSummary:
    """Medians over the rounds of one engine; the peak of its run for memory."""

    engine: str
    first_batch_s: float
    """Over all epochs of all rounds."""
    images_per_s: float
    wait_s: float
    wait_share: float
    peak_bytes: float
    accuracy: float


def run_once(
    spec: dict[str, Any], digits: bytes, on_event: Callable[[dict[str, Any]], None], *, sample_memory: bool
) -> Run:
    """Train once in a child process.

    Args:
        spec: the fields of `demo_train.RunSpec`.
        digits: `DigitArrays.to_bytes()`.
        on_event: called with the ``start`` and ``batch`` events as they come.
        sample_memory: whether to sample PSS while it runs, which slows it down.

    Raises:
        RunFailed: the child died, raised, or said nothing for `SILENCE_S`.
    """
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "torchcrew.cli.demo_train"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": _import_path()},
        )
        sampler = PssSampler(child.pid) if sample_memory else None
        try:
            result = _converse(child, spec, digits, on_event)
        finally:
            memory = sampler.stop() if sampler is not None else []
            _end(child)
        if result is None:
            raise RunFailed(f"the {spec['engine']} run ended with status {child.returncode}:\n{_tail(errors)}")
    began, ended = result["started_at"], result["ended_at"]
    during = [(at - began, size) for at, size in memory if began <= at <= ended]
    return Run(spec["engine"], result, during)


def summarise(runs: list[Run], memory_run: Run) -> EngineSummary:
    """The medians of runs of one engine, and the peak of its run for memory."""

    def median(values: Iterator[float]) -> float:
        return float(statistics.median(values))

    return EngineSummary(
        engine=runs[0].engine,
        first_batch_s=median(value for run in runs for value in run.result["first_batch_s"]),
        images_per_s=median(run.images_per_s for run in runs),
        wait_s=median(run.result["wait_s"] for run in runs),
        wait_share=median(run.wait_share for run in runs),
        peak_bytes=memory_run.peak_bytes,
        accuracy=median(run.result["accuracy"] for run in runs),
    )


def same_results(runs: list[Run]) -> dict[str, bool]:
    """Whether accuracy, every loss and the trained weights are the same, to the last digit, in all runs."""
    return {
        name: all(run.result[name] == runs[0].result[name] for run in runs)
        for name in ("accuracy", "losses", "weights")
    }


def as_json(run: Run) -> dict[str, Any]:
    """A run for the JSON file."""
    derived = {"images_per_s": run.images_per_s, "wait_share": run.wait_share, "peak_bytes": run.peak_bytes}
    return {**asdict(run), **derived}


def _converse(
    child: subprocess.Popen[bytes], spec: dict[str, Any], digits: bytes, on_event: Callable[[dict[str, Any]], None]
) -> dict[str, Any] | None:
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(json.dumps(spec).encode() + b"\n" + digits)
        child.stdin.close()
    except BrokenPipeError:
        return None
    for line in _lines(child.stdout):
        event = json.loads(line)
        if event.pop("event") == "result":
            return dict(event)
        on_event(event)
    return None


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Lines as they come; ends at EOF, raises `RunFailed` after `SILENCE_S` of nothing."""
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            if not selector.select(SILENCE_S):
                raise RunFailed(f"a training run has said nothing for {SILENCE_S:.0f} s")
            data = os.read(stream.fileno(), 1 << 16)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            yield from lines


def _end(child: subprocess.Popen[bytes]) -> None:
    """Wait for the child, which has nothing left to do, or end it."""
    assert child.stdout is not None
    try:
        child.wait(timeout=10 if sys.exc_info()[0] is None else 0.5)
    except subprocess.TimeoutExpired:
        child.terminate()
        try:
            child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(timeout=5)
    finally:
        child.stdout.close()


def _tail(errors: IO[bytes]) -> str:
    errors.seek(0)
    return errors.read().decode(errors="replace").strip()[-STDERR_TAIL:]


def _import_path() -> str:
    """PYTHONPATH with which the child imports this same torchcrew, also where it is run from a source tree."""
    source = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([*filter(None, inherited.split(os.pathsep)), source])
