"""Threads of a rank: what "auto" chooses, against every choice by hand.

    python -m benchmarks.rank_threads [--repeats N]

Two ranks train side by side, once on large matrix products, once on many small operations. Each measurement is one
`torchcrew.launch` with ``threads_per_rank`` as named; the time is that of a step, the median of each rank's, the slower
rank's taken. The weights after the last step have the same sum in every run, to the rounding of sums in another order.
``torchrun`` would give each rank one thread, ``mp.spawn`` all cores.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from functools import partial

import torch
from torch import nn

import torchcrew
from benchmarks import harness
from benchmarks.harness import OURS, Claim, Measurement, Row

RANKS = 2
#: Work: sizes of layers, samples of a batch, steps that are timed, and before them.
WORKS = {"matmul": ((1024, 1024, 1024, 1024), 512, 12, 3), "small": ((32,) * 9, 16, 150, 20)}
LABELS = {"matmul": "large matrix products", "small": "many small operations"}


def step_seconds(work: str) -> tuple[float, float, int]:
    """Train; the median time of a step, the sum of the weights, and the threads this rank has."""
    sizes, batch, steps, before = WORKS[work]
    torch.manual_seed(0)
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data, target = torch.randn(batch, sizes[0]), torch.randn(batch, sizes[-1])
    torch.distributed.barrier()  # all ranks compute at the same time

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(data), target).backward()
        optimizer.step()

    seconds = harness.median_seconds(step, before, steps)
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    return seconds, total, torch.get_num_threads()


def main() -> None:
    bench = harness.Benchmark("rank_threads", str(__doc__))
    cores = len(os.sched_getaffinity(0))
    choices = {OURS: "auto", **{f"{count} threads" if count > 1 else "1 thread": count for count in _powers(cores)}}
    for work, label in LABELS.items():
        sums: list[float] = []
        engines = {name: partial(_run, work, choice, sums) for name, choice in choices.items()}
        measured = harness.alternate(engines, bench.repeats)
        if not all(math.isclose(total, sums[0], rel_tol=1e-3, abs_tol=1e-3) for total in sums):
            sys.exit(f"the weights differ: {sorted(set(sums))}")
        others = [name for name in choices if name != OURS]
        bench.add(
            Row(
                key=work,
                work=f"{RANKS} ranks, {label}, threads",
                metric="step_s",
                per="step",
                measured=measured,
                claims=[Claim(f"at least 0.95 of {name}", against=name, at_least=0.95) for name in others],
                notes=[f"auto is {int(measured[OURS][0]['threads'])} on {cores} cores"],
            )
        )
    bench.finish()


def _powers(cores: int) -> list[int]:
    return [2**power for power in range(cores.bit_length()) if 2**power <= cores]


def _run(work: str, choice: int | str, sums: list[float]) -> Measurement:
    results = torchcrew.launch(step_seconds, work, nprocs=RANKS, threads_per_rank=choice)
    sums += [total for _, total, _ in results]
    return {"step_s": max(seconds for seconds, _, _ in results), "threads": results[0][2]}


if __name__ == "__main__":
    main()
