"""What grows with the number of workers: descriptors, memory, time a batch, first batch; 1, 2, 4, ... 64 workers.

    python -m benchmarks.growth [--repeats N]

Samples of 64 KB sleep 5 ms each, as a remote read does, four to a batch: workers cost next to no CPU, so one may have
many more than cores. Each measurement is a program of its own that goes through all sizes; time a batch and first batch
come from one epoch, descriptors of the trainer (above those it had before its first loader) and PSS of the workers from
a second one, halfway, since looking at them takes time. Every batch of a third one is hashed.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import warnings
from functools import partial
from typing import Any

import torch.utils.data

import torchcrew.data
from benchmarks import harness
from benchmarks.datasets import Sleepy
from benchmarks.harness import OURS, STOCK, Measurement, Row
from benchmarks.memory import pss, tree

SIZES = (1, 2, 4, 8, 16, 32, 64)
BATCH, SAMPLE_SECONDS = 4, 0.005
BATCHES_PER_WORKER = 12
#: Seconds that one program may take.
DEADLINE = 300
#: What "flat" allows for the step from half the largest size to the largest.
FLAT = 1.25


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(_program(sys.argv[2])))
        return
    bench = harness.Benchmark("growth", str(__doc__))
    digests: dict[str, list[str]] = {}
    measured = harness.alternate({name: partial(_run, name, digests) for name in (STOCK, OURS)}, bench.repeats)
    harness.compare(OURS, digests[OURS], digests[STOCK])
    names = ("batch_s", "first_s", "descriptors", "worker_pss_bytes")
    series = {
        engine: {
            name: [harness.summary([run[f"{name}_{workers}"] for run in runs]) for workers in SIZES] for name in names
        }
        for engine, runs in measured.items()
    }
    bench.add(
        Row(
            key="growth",
            work=f"sleeping samples, {SIZES[-1]} workers",
            metric="batch_s",
            per="batch",
            measured={engine: [_at_largest(run) for run in runs] for engine, runs in measured.items()},
            verified=harness.verdict(list(measured), digests[STOCK]),
            more={
                "workers": list(SIZES),
                "series": series,
                "ideal_batch_s": [BATCH * SAMPLE_SECONDS / workers for workers in SIZES],
                "claims": _claims(series[OURS]),
            },
        )
    )
    bench.finish()


def _at_largest(run: Measurement) -> Measurement:
    return {name: run[f"{name}_{SIZES[-1]}"] for name in ("batch_s", "first_s", "descriptors", "worker_pss_bytes")}


def _claims(ours: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Nothing per worker grows from half the largest size to the largest by more than `FLAT`."""

    def median(name: str, at: int) -> float:
        return float(statistics.median(ours[name][at]["values"]))

    def growth(name: str, *, per_worker: bool) -> float:
        step = median(name, -1) / median(name, -2)
        return step * SIZES[-2] / SIZES[-1] if per_worker else step

    grown = {
        f"descriptors a worker flat from {SIZES[-2]} to {SIZES[-1]}": growth("descriptors", per_worker=True),
        f"PSS a worker flat from {SIZES[-2]} to {SIZES[-1]}": growth("worker_pss_bytes", per_worker=False),
        f"first batch a worker flat from {SIZES[-2]} to {SIZES[-1]}": growth("first_s", per_worker=True),
        f"time a batch does not rise from {SIZES[-2]} to {SIZES[-1]}": growth("batch_s", per_worker=False),
    }
    return [
        {"text": text, "target": FLAT, "measured": value, "reached": value <= FLAT} for text, value in grown.items()
    ]


def _run(name: str, digests: dict[str, list[str]]) -> Measurement:
    result = harness.run_child("benchmarks.growth", name, timeout=DEADLINE)
    found: list[str] = result.pop("digests")
    harness.compare(name, found, digests.setdefault(name, found))
    return result


def _program(name: str) -> dict[str, Any]:
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than cores: on purpose
    make: Any = torchcrew.data.DataLoader if name == OURS else torch.utils.data.DataLoader
    result: dict[str, Any] = {}
    digests: list[str] = []
    before = _descriptors()
    for workers in SIZES:
        dataset = Sleepy(BATCH * BATCHES_PER_WORKER * workers, SAMPLE_SECONDS)
        timed = harness.time_epoch(make(dataset, BATCH, num_workers=workers))
        result[f"batch_s_{workers}"], result[f"first_s_{workers}"] = timed["batch_s"], timed["first_s"]
        iterator = iter(make(dataset, BATCH, num_workers=workers))
        for _ in range(BATCHES_PER_WORKER * workers // 2):
            batch = next(iterator)
        result[f"descriptors_{workers}"] = _descriptors() - before
        pids = [process.pid for process in iterator._workers]
        result[f"worker_pss_bytes_{workers}"] = sum(map(pss, pids)) / workers
        result[f"all_pss_bytes_{workers}"] = sum(map(pss, tree(os.getpid())))
        del iterator, batch
        few = Sleepy(BATCH * 2 * workers, 0.0)
        digests += [harness.digest(batch) for batch in make(few, BATCH, num_workers=workers)]
    return {**result, "digests": digests}


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


if __name__ == "__main__":
    main()
