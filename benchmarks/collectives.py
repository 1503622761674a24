"""Collectives of the process group `crew` beside gloo's: all-reduce, a step of DistributedDataParallel, one of FSDP2.

    python -m benchmarks.collectives [--repeats N] [--quick]

Two ranks of one thread each, the same two processes for everything, with a group of either backend between them. A
measurement is a block of calls by one engine; blocks alternate. A call is timed in each rank; the figure is the median
of a block's calls in the rank where that is larger. What all ranks hold after a block, the last sum or all weights of
the model, is hashed and must be the same on both ranks, with both engines, in all repeats.

"Shared" tensors are those of `torchcrew.share`; "fresh" ones are made before the clock starts, and reduced once each.
The floor of all-reduces is a copy of the same bytes by both ranks at once, each from its own memory to its own; that of
trainings the same step without a peer. `DistributedDataParallel` has its default settings, or the best ones for gloo:
``gradient_as_bucket_view=True, static_graph=True``. The curve over sizes is in the JSON with the first row.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torchcrew
from benchmarks import collectives_ranks as ranks
from benchmarks import harness
from benchmarks.collectives_ranks import ALONE, FRESH, ORDINARY, SHARED
from benchmarks.harness import COPY, OURS, STOCK, Benchmark, Claim, Measurement, Row

RANKS = 2
#: Key -> how the size is called, bytes, where the tensors are, how many times faster than gloo.
REDUCES = {
    "100MB_shared": ("100 MB", 100_000_000, SHARED, 3.0),
    "100MB_fresh": ("100 MB", 100_000_000, FRESH, 1.5),
    "1MB_shared": ("1 MB", 1 << 20, SHARED, 4.0),
    "1MB": ("1 MB", 1 << 20, ORDINARY, 4.0),
    "4KB_shared": ("4 KB", 4 << 10, SHARED, 5.0),
    "4KB": ("4 KB", 4 << 10, ORDINARY, 5.0),
}
TRAININGS = {
    "ddp": "`DistributedDataParallel`, default settings",
    "ddp_best": "`DistributedDataParallel`, gloo's best settings",
    "fsdp": "FSDP2 `fully_shard`",
}
#: Bytes of the curve: 1 KB to 256 MB.
SIZES = tuple(1 << power for power in range(10, 29, 2))
#: Engines of the curve: all of ordinary tensors but one.
CURVE = {STOCK: ORDINARY, OURS: ORDINARY, f"{OURS}, shared": SHARED, COPY: ORDINARY}
#: Seconds without progress of a rank after which the benchmark ends.
STUCK = 120


class Pair:
    """Two ranks, and what they have been found to hold."""

    def __init__(self, crew: torchcrew.Crew, is_quick: bool) -> None:
        self._crew = crew
        self._is_quick = is_quick
        self._digests: dict[str, list[str]] = {}
        crew.run(ranks.meet, crew)

    def measure(self, work: str, fn: Callable[..., Any], engine: str, *args: Any) -> Measurement:
        """Have both ranks do a block.

        Raises:
            SystemExit: the ranks hold different bits, or others than after a block before.
        """
        blocks = self._crew.run(fn, self._crew, engine, *args, is_quick=self._is_quick)
        found = [block.digest for block in blocks if block.digest]
        if found:
            harness.compare(f"{work}, {engine}", found, self._digests.setdefault(work, [found[0]] * RANKS))
        return {"call_s": max(block.seconds for block in blocks)}

    def digest(self, work: str) -> str:
        """Of what all ranks hold after a block."""
        return self._digests[work][0]


def main() -> None:
    arguments = [argument for argument in sys.argv[1:] if argument != "--quick"]
    is_quick = len(arguments) < len(sys.argv) - 1
    bench = Benchmark("collectives", str(__doc__), arguments=arguments)
    sizes = SIZES[:8:3] if is_quick else SIZES
    with torchcrew.Crew(RANKS, backend="gloo", threads_per_rank=1, timeout=STUCK) as crew:
        pair = Pair(crew, is_quick)
        curve = _curve(pair, bench.repeats, sizes)
        for key in REDUCES:
            bench.add(_reduce_row(pair, bench.repeats, key, curve))
            curve = {}
        for spread, label in TRAININGS.items():
            bench.add(_training_row(pair, bench.repeats, spread, label))
    bench.finish()


def _reduce_row(pair: Pair, repeats: int, key: str, more: Mapping[str, Any]) -> Row:
    label, nbytes, memory, target = REDUCES[key]
    engines = {name: partial(pair.measure, key, ranks.reduce, name, nbytes, memory) for name in (STOCK, OURS, COPY)}
    return Row(
        key=key,
        work=f"all_reduce, {label} float32, {memory}",
        metric="call_s",
        per="call",
        measured=harness.alternate(engines, repeats),
        claims=[Claim(f"at least {target:g} times faster than stock", at_least=target)],
        floor=COPY,
        notes=["the last sums of every block are the same, bit for bit, on both ranks, with both engines"],
        more={**more, "digest": pair.digest(key)},
    )


def _training_row(pair: Pair, repeats: int, spread: str, label: str) -> Row:
    engines = {name: partial(pair.measure, spread, ranks.train, name, spread) for name in (STOCK, OURS, ALONE)}
    millions = ranks.parameters() / 1e6
    return Row(
        key=spread,
        work=f"{label}, {millions:.1f} M parameters, batch {ranks.BATCH}",
        metric="call_s",
        per="step",
        measured=harness.alternate(engines, repeats),
        claims=[Claim("at least 1.2 times faster than stock", at_least=1.2)],
        floor=ALONE,
        notes=["all weights are the same, bit for bit, on both ranks, with both engines, in every repeat"],
        more={"digest": pair.digest(spread)},
    )


def _curve(pair: Pair, repeats: int, sizes: Sequence[int]) -> dict[str, Any]:
    """Seconds of a call by size, of each engine of the curve: all sizes once, then again."""
    works = {size: f"all_reduce of {size} bytes" for size in sizes}
    engines = {
        f"{name} {size}": partial(pair.measure, works[size], ranks.reduce, _engine(name), size, memory)
        for size, (name, memory) in itertools.product(sizes, CURVE.items())
    }
    measured = harness.alternate(engines, repeats)
    series = {
        name: [harness.summary([run["call_s"] for run in measured[f"{name} {size}"]]) for size in sizes]
        for name in CURVE
    }
    return {"sizes": list(sizes), "series": series}


def _engine(name: str) -> str:
    return name.partition(",")[0]


if __name__ == "__main__":
    main()
