"""Benchmarks: stock and torchcrew, alternating in one run, with equal results.

    python -m benchmarks                    all of them, each in a process of its own; tables, JSON, pictures
    python -m benchmarks.small_batches      one
    python -m benchmarks --repeats 3        fewer repeats than the usual 7 (a look, not a result)
    make bench                              the first, in the project's own environment

What is timed, how it is checked and what stands in the JSON is told in `benchmarks.harness`. Results are in
``benchmarks/results/NAME.json``; ``tools/readme_table.py`` makes the tables of the README and the guide from them.
The SPDL peer is measured where ``spdl-core`` 0.8 is installed (``pip install --no-deps spdl-core==0.8.0``).
"""

from __future__ import annotations

#: Modules of this package that are benchmarks, by the table they stand in, in its order.
GROUPS = {
    "data": ("small_batches", "large_batches", "many_tensors", "first_batch", "tiny_epochs", "memory", "growth"),
    "multiprocessing": ("queues", "native_queues", "pool", "processes", "shared_dataset"),
    "launching": ("launching", "rank_threads"),
    "collectives": ("collectives",),
}
NAMES = tuple(name for names in GROUPS.values() for name in names)

__all__ = ("GROUPS", "NAMES")
