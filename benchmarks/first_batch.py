"""The first batch of workers that start with spawn's semantics: stock's start methods, and our zygote.

    python -m benchmarks.first_batch [--repeats N]

Two workers, ints in batches of 32, an importable dataset. Timed is making the loader, its iterator and the first batch.
Each measurement is a program of its own (`benchmarks.first_batch_program`), which makes two loaders: "cold" is the
first, when the forkserver or the zygote starts too; "warm" is the second, which is what every further loader and epoch
pays. Stock's forkserver is measured as it is and with torch preloaded, the usual advice. The floor is stock with fork,
which imports nothing.
"""

from __future__ import annotations

from functools import partial

import torchcrew.data
from benchmarks import harness
from benchmarks.datasets import Ints
from benchmarks.harness import OURS, STOCK, Claim, Measurement, Row

FORKSERVER, PRELOADED, FORK = "stock, forkserver", "stock, forkserver + preload", "stock, fork"
#: Seconds that one program may take; stock's slowest takes ten.
DEADLINE = 120
CONTEXTS = {
    STOCK: ("spawn",),
    FORKSERVER: ("forkserver",),
    PRELOADED: ("forkserver", "torch", "torch.utils.data"),
    FORK: ("fork",),
    OURS: ("zygote",),
}


def main() -> None:
    bench = harness.Benchmark("first_batch", str(__doc__))
    digests: dict[str, list[str]] = {}
    measured = harness.alternate({name: partial(_run, name, digests) for name in _engines()}, bench.repeats)
    for name, found in digests.items():
        harness.compare(name, found, digests[STOCK])
    missing = [] if OURS in measured else ["the zygote is not there yet"]
    for moment, claims in (
        ("warm", [Claim("under 80 ms", at_most=0.080)]),
        ("cold", [Claim("not slower than stock's spawn", at_least=1.0)]),
    ):
        bench.add(
            Row(
                key=f"first_batch_{moment}",
                work=f"first batch, spawn's semantics, {moment}",
                metric=f"{moment}_s",
                per="loader",
                measured=measured,
                claims=claims,
                floor=FORK,
                verified=harness.verdict(list(measured), digests[STOCK]),
                notes=["stock is multiprocessing_context='spawn', torchcrew is 'zygote'", *missing],
            )
        )
    bench.finish()


def _engines() -> list[str]:
    return [name for name in CONTEXTS if name != OURS or _has_zygote()]


def _has_zygote() -> bool:
    try:
        torchcrew.data.DataLoader(Ints(1), num_workers=1, multiprocessing_context="zygote")
    except (ImportError, ValueError):
        return False
    return True


def _run(name: str, digests: dict[str, list[str]]) -> Measurement:
    """One program; its digests are compared with those of earlier ones of the same engine, and kept."""
    result = harness.run_child("benchmarks.first_batch_program", name, *CONTEXTS[name], timeout=DEADLINE)
    harness.compare(name, result["digests"], digests.setdefault(name, result["digests"]))
    return {"cold_s": result["cold_s"], "warm_s": result["warm_s"]}


if __name__ == "__main__":
    main()
