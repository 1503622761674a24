"""Processes: what starting one costs where torch is imported in it, and the tutorials' shared model under spawn.

    python -m benchmarks.processes [--repeats N]

Each measurement is a program of its own (`benchmarks.processes_program`). "Cold" is the first time in a program, when
the zygote starts too; "warm" is the second time. Stock is `torch.multiprocessing` with spawn, ours the same names of
`torchcrew.multiprocessing`, whose spawn is served by the zygote. The floor is stock's fork, which imports nothing.

The training is that of the tutorials: four processes, ten steps each over one model in shared memory; what is checked
is that its loss has fallen below a hundredth.
"""

from __future__ import annotations

from functools import partial

from benchmarks import harness
from benchmarks.harness import OURS, STOCK, Claim, Measurement, Row

FORK = "stock, fork"
#: Engine, start method.
ENGINES = {STOCK: ("stock", "spawn"), FORK: ("stock", "fork"), OURS: ("torchcrew", "spawn")}
#: Seconds that one program may take; stock's slowest takes thirty.
DEADLINE = 180


def main() -> None:
    bench = harness.Benchmark("processes", str(__doc__))
    measured = harness.alternate({name: partial(_run, "start", name) for name in ENGINES}, bench.repeats)
    bench.add(
        Row(
            key="process_warm",
            work="`Process` that has torch imported: start, run, join; warm",
            metric="warm_s",
            per="process",
            measured=measured,
            claims=[Claim("under 30 ms", at_most=0.030)],
            floor=FORK,
        )
    )
    measured = harness.alternate({name: partial(_run, "train", name) for name in (STOCK, OURS)}, bench.repeats)
    for moment, seconds in (("cold", 4.0), ("warm", 1.0)):
        bench.add(
            Row(
                key=f"shared_model_{moment}",
                work=f"tutorial: shared model, spawn, 4 processes × 10 steps, {moment}",
                metric=f"{moment}_s",
                per="training",
                measured=measured,
                claims=[Claim(f"under {seconds:.0f} s", at_most=seconds)],
                notes=["the loss fell below a hundredth in every run"],
            )
        )
    bench.finish()


def _run(work: str, name: str) -> Measurement:
    result = harness.run_child("benchmarks.processes_program", work, *ENGINES[name], timeout=DEADLINE)
    return {"cold_s": result["cold_s"], "warm_s": result["warm_s"]}


if __name__ == "__main__":
    main()
