"""Batches of images: 19.3 MB of float32 and 9.6 MB of uint8, tensors and numpy samples, beside stock and SPDL.

    python -m benchmarks.large_batches [--repeats N]

Two workers, default collate. The floor is a copy of a batch's bytes from warm to warm memory by all cores. The peer is
SPDL 0.8 the way its guides recommend for large payloads: a pipeline in a subprocess whose stage fetches and collates a
whole batch in one of two threads, and hands it over in a pool of shared segments. Its process is started once, before
the first repeat, while the workers of the other two are new in every epoch; nobody's start is in the time a batch.
SPDL is measured where it is installed: ``pip install --no-deps spdl-core==0.8.0``.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import version
from multiprocessing import resource_tracker
from typing import Any

import torch
from torch.utils.data import BatchSampler, SequentialSampler, default_collate

import torchcrew.data
from benchmarks import harness
from benchmarks.datasets import Images
from benchmarks.harness import COPY, IN_PROCESS, OURS, STOCK, Claim, Row

WORKERS = 2
BATCHES = 64
PEER = "SPDL"
#: Segments of SPDL's pool: its queue of 3, one at each side, and one that is being written by each thread.
SEGMENTS = 8
IMAGE_PIXELS = 3 * 224 * 224
MISSING = "SPDL is not installed (pip install --no-deps spdl-core==0.8.0): not compared with it"


def main() -> None:
    bench = harness.Benchmark("large_batches", str(__doc__))
    _silence_resource_tracker()
    bench.add(
        _row(
            bench,
            "float32",
            "32 × (3, 224, 224) float32, 19 MB a batch",
            Images(32 * BATCHES, torch.float32),
            32,
            [Claim("at least 5 times faster than stock", at_least=5)],
        )
    )
    for kind in ("tensor", "numpy"):
        bench.add(
            _row(
                bench,
                f"uint8_{kind}",
                f"64 × (3, 224, 224) uint8 {kind} samples, 9.6 MB a batch",
                Images(64 * BATCHES, torch.uint8, as_numpy=kind == "numpy"),
                64,
                [
                    Claim("at least 2.5 times faster than stock", at_least=2.5),
                    Claim("at least 1.5 times faster than SPDL's segment pool", PEER, at_least=1.5),
                ],
                peer=importlib.util.find_spec("spdl") is not None,
            )
        )
    bench.finish()


def _row(
    bench: harness.Benchmark,
    key: str,
    work: str,
    dataset: Images,
    batch: int,
    claims: list[Claim],
    *,
    peer: bool = False,
) -> Row:
    loaders: dict[str, Callable[[], Iterable[Any]]] = {
        STOCK: lambda: torch.utils.data.DataLoader(dataset, batch, num_workers=WORKERS),
        OURS: lambda: torchcrew.data.DataLoader(dataset, batch, num_workers=WORKERS),
    }
    nbytes = batch * IMAGE_PIXELS * (4 if key == "float32" else 1)
    notes = []
    if peer:
        pipeline = _spdl_pipeline(dataset, batch, nbytes)
        loaders[PEER] = lambda: pipeline
        notes.append(f"SPDL {version('spdl-core')}: run_pipeline_in_subprocess, {WORKERS} threads, {SEGMENTS} segments")
    elif key != "float32":
        notes.append(MISSING)
    loaders[IN_PROCESS] = lambda: torch.utils.data.DataLoader(dataset, batch)
    extra = {COPY: lambda: {"batch_s": harness.time_copy(nbytes)}}
    measured, verified = harness.run_epochs(loaders, bench.repeats, extra)
    return Row(key, work, "batch_s", "batch", measured, claims, COPY, verified, notes, {"batch_bytes": nbytes})


def _spdl_pipeline(dataset: Images, batch: int, nbytes: int) -> Iterable[Any]:
    """SPDL's loader of the same batches, in the same order; its process starts here and ends with the object."""
    from spdl.pipeline import PipelineBuilder, SharedMemorySegmentPool, run_pipeline_in_subprocess

    builder: Any = PipelineBuilder()
    config = (
        builder.add_source(BatchSampler(SequentialSampler(dataset), batch, drop_last=False))
        .pipe(partial(_fetch, dataset), concurrency=WORKERS, output_order="input")
        .add_sink(3)
        .get_config()
    )
    pool = SharedMemorySegmentPool(nbytes + 2**20, SEGMENTS)
    pipeline: Iterable[Any] = run_pipeline_in_subprocess(
        config,
        num_threads=WORKERS,
        max_failures=0,
        arena=pool,
        # As stock does in its workers; more would fight for the same two cores.
        initializer=partial(torch.set_num_threads, 1),
        timeout=60,
    )
    return pipeline


def _silence_resource_tracker() -> None:
    """Start Python's resource tracker without a voice.

    Both of SPDL's processes unregister each segment, and the tracker prints a traceback for every second time.
    """
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 2)
        resource_tracker.ensure_running()
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _fetch(dataset: Images, indices: list[int]) -> Any:
    return default_collate([dataset[index] for index in indices])


if __name__ == "__main__":
    main()
