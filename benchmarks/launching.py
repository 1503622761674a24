"""Launching ranks: start, a whole training, and how long an error takes, against mp.spawn, elastic and torchrunx.

    python -m benchmarks.launching [--repeats N]

Each measurement is a program of its own (`benchmarks.launching_program`). "Cold" is from the start of that program's
interpreter to the end of its first job, imports included; "warm" is its second job. The stock engine is
`torch.multiprocessing.spawn` with gloo over a TCP port, as the tutorials have it; "elastic" is torchrun's engine called
as a function. The training is the tutorial's `DistributedDataParallel` on four ranks; every engine's final loss must be
the same. The error is an exception of rank 1 while rank 0 waits in `all_reduce`, timed from the moment it is raised to
the moment the caller has it. torchrunx is measured where it is installed.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import partial

from benchmarks import harness
from benchmarks.harness import OURS, STOCK, Claim, Measurement, Row

ELASTIC, TORCHRUNX = "elastic", "torchrunx"
#: Seconds that one program may take.
DEADLINE = 180


def main() -> None:
    bench = harness.Benchmark("launching", str(__doc__))
    engines = [STOCK, OURS, ELASTIC]
    if importlib.util.find_spec("torchrunx"):
        engines.append(TORCHRUNX)
    start = harness.alternate({name: partial(_run, "start", name) for name in engines}, bench.repeats)
    for moment, claim in (
        ("warm", Claim("at most 0.15 s", at_most=0.15)),
        ("cold", Claim("at most 1.1 times mp.spawn's", at_least=1 / 1.1)),
    ):
        bench.add(
            Row(
                key=f"start_{moment}",
                work=f"start of 2 ranks with a process group, {moment}",
                metric=f"{moment}_s",
                per="job",
                measured=start,
                claims=[claim],
                notes=["each rank's all_reduce was checked"],
            )
        )
    training = harness.alternate({name: partial(_run, "train", name) for name in engines[:3]}, bench.repeats)
    _check_losses(training)
    for moment, seconds in (("cold", 4.0), ("warm", 1.0)):
        bench.add(
            Row(
                key=f"ddp_{moment}",
                work=f"tutorial: DistributedDataParallel, 4 ranks × 40 steps, {moment}",
                metric=f"{moment}_s",
                per="training",
                measured=training,
                claims=[Claim(f"at most {seconds:.0f} s", at_most=seconds)],
                notes=["the final loss was the same in every run of every engine"],
            )
        )
    # torchrunx gives none within minutes.
    error = harness.alternate({name: partial(_run, "error", name) for name in engines[:3]}, bench.repeats)
    bench.add(
        Row(
            key="error",
            work="error of rank 1 while rank 0 waits in all_reduce",
            metric="error_s",
            per="error",
            measured=error,
            claims=[Claim("at most 0.5 s", at_most=0.5)],
            notes=["torchrunx: none within 150 s"],
        )
    )
    bench.finish()


def _run(work: str, name: str) -> Measurement:
    return harness.run_child("benchmarks.launching_program", work, name, timeout=DEADLINE)


def _check_losses(measured: dict[str, list[Measurement]]) -> None:
    losses = {run.pop("loss") for runs in measured.values() for run in runs}
    if len(losses) != 1:
        sys.exit(f"the engines' final losses differ: {sorted(losses)}")


if __name__ == "__main__":
    main()
