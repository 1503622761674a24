"""A list of 1,000,000 small dicts in a dataset, 4 workers: until the first batch, and memory of a worker.

    python -m benchmarks.shared_dataset [--repeats N]

Stock's dataset has the list itself: every worker started by forkserver gets a copy of it; under fork, a copy grows with
the reference counts of what is read. torchcrew's has ``torchcrew.share(the list)``. Each measurement is a program of
its own (`benchmarks.shared_dataset_program`). "First batch" is everything from the finished list on: sharing it, the
loader, the start of the workers (and of the zygote that torchcrew's are forked from), the first batch.

Memory is measured after three shuffled epochs, above that of a worker with hardly any dataset: memory of its own (USS),
and with its part of what it shares (PSS). Every batch of all epochs has a checksum of every value in it, which is
compared with stock's.
"""

from __future__ import annotations

from functools import partial

from benchmarks import harness
from benchmarks.harness import OURS, STOCK, Claim, Measurement, Row

ITEMS = 1_000_000
#: Seconds that one program may take; stock's slowest takes a minute.
DEADLINE = 400
FORK = "stock, fork"
ENGINES = {STOCK: ("stock", "forkserver"), FORK: ("stock", "fork"), OURS: ("torchcrew", "zygote")}
#: What it must reach.
FIRST_SECONDS, WORKER_BYTES = 4.0, 15e6


def main() -> None:
    bench = harness.Benchmark("shared_dataset", str(__doc__))
    digests: dict[str, list[str]] = {}
    measured = harness.alternate({name: partial(_run, name, digests) for name in ENGINES}, bench.repeats)
    for name, found in digests.items():
        harness.compare(name, found, digests[STOCK])
    rows: tuple[tuple[str, str, str, list[Claim]], ...] = (
        ("first_s", "first batch", "loader", [Claim(f"under {FIRST_SECONDS:.0f} s", at_most=FIRST_SECONDS)]),
        ("uss_bytes", "memory of its own (USS)", "worker", [Claim("under 15 MB", at_most=WORKER_BYTES)]),
        ("pss_bytes", "memory with its part of the copy (PSS)", "worker", []),
    )
    for metric, work, per, claims in rows:
        bench.add(
            Row(
                key=f"shared_dataset_{metric.partition('_')[0]}",
                work=f"list of {ITEMS:,} dicts, {work}",
                metric=metric,
                per=per,
                measured=measured,
                claims=claims,
                verified=harness.verdict(list(measured), digests[STOCK]),
                notes=["stock is multiprocessing_context='forkserver', torchcrew is 'zygote'"],
            )
        )
    bench.finish()


def _run(name: str, digests: dict[str, list[str]]) -> Measurement:
    engine, context = ENGINES[name]
    result = harness.run_child("benchmarks.shared_dataset_program", engine, context, str(ITEMS), timeout=DEADLINE)
    found: list[str] = result.pop("digests")
    harness.compare(name, found, digests.setdefault(name, found))
    return result


if __name__ == "__main__":
    main()
