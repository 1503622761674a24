"""What the ranks of `benchmarks.collectives` do: one block of calls, or of steps of a training, by one engine.

    benchmarks.collectives ── Crew.run(reduce, ...) ──► both ranks, the same processes all the time: a block each
                           ◄── seconds of a call, digest of what came out, by rank ──

Both groups are there at once, but in a block only one of them is used, its barrier included: a rank of ours that looks
for its peer takes the core from nobody who is measured. Nothing of a group runs between two calls.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchcrew
from benchmarks.harness import COPY, OURS, STOCK, digest, median_seconds
from torchcrew.collectives import register

__all__ = ("ALONE", "BATCH", "FRESH", "ORDINARY", "SHARED", "Block", "meet", "parameters", "reduce", "train")

#: What a floor of the trainings is called: the same step without another rank.
ALONE = "no exchange"
#: Where the tensors of a block are.
ORDINARY, SHARED, FRESH = "ordinary tensor", "shared tensor", "fresh ordinary tensor"
#: Most calls between two fillings: each doubles the sum, and 2^51 is far from the end of float32.
_CALLS = 50
_BATCH_FEATURES, _WIDTH, _CLASSES = 256, 4096, 10
#: Samples of each rank in a step.
BATCH = 16


class Block(NamedTuple):
    """What one rank says of one block."""

    seconds: float
    """The median of its calls, or steps."""
    digest: str
    """Of what it then had; "" where nothing is exchanged."""


def meet(crew: Any) -> None:
    """Make the groups of both engines among the same ranks."""
    register()
    crew.local.groups = {STOCK: dist.group.WORLD, OURS: dist.new_group(backend="crew")}


# All-reduce -----------------------------------------------------------------------------------------------------------


def reduce(crew: Any, engine: str, nbytes: int, memory: str, *, is_quick: bool) -> Block:
    """All-reduces of float32, or for the floor copies, of ``nbytes``.

    Ranks call in a row, after a barrier at the begin of each row: as a collective ends when all have come, they stay
    together. Fresh tensors are made before a barrier in front of each call.
    """
    calls, rows = (2, 1) if is_quick else _schedule(nbytes)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    source = torch.rand(nbytes // 4, generator=generator)
    target = torchcrew.share(source) if memory == SHARED else source.clone()
    group = crew.local.groups[OURS if engine == COPY else engine]
    work = _copy if engine == COPY else dist.all_reduce
    other = source if engine == COPY else group
    seconds = []
    for row in range(rows + 1):  # the first one is not timed
        target.copy_(source)
        dist.barrier(group)
        for _ in range(calls):
            if memory == FRESH:
                target = source.clone()
                dist.barrier(group)
            began = time.perf_counter()
            work(target, group=other)
            seconds.append(time.perf_counter() - began)
        if row == 0:
            seconds.clear()
    return Block(statistics.median(seconds), "" if engine == COPY else digest(target))


def _schedule(nbytes: int) -> tuple[int, int]:
    """Calls in a row, and rows: a tenth of a second and more, and not many seconds."""
    calls = max(5, min(_CALLS, (256 << 20) // nbytes))
    return calls, max(1, min(20, (128 << 20) // (nbytes * calls)))


def _copy(target: torch.Tensor, group: torch.Tensor) -> None:
    target.copy_(group)


# Training -------------------------------------------------------------------------------------------------------------


def make_model() -> nn.Sequential:
    """A perceptron of 17.9 million parameters, the same in every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(_BATCH_FEATURES, _WIDTH),
        nn.ReLU(),
        nn.Linear(_WIDTH, _WIDTH),
        nn.ReLU(),
        nn.Linear(_WIDTH, _CLASSES),
    )


def parameters() -> int:
    """How many the model has."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make_model().parameters())


def _shard(model: nn.Sequential, group: Any) -> nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


#: How a model is spread over a group.
SPREADS: dict[str, Callable[[Any, Any], nn.Module]] = {
    "ddp": lambda model, group: DistributedDataParallel(model, process_group=group),
    "ddp_best": lambda model, group: DistributedDataParallel(
        model, process_group=group, gradient_as_bucket_view=True, static_graph=True
    ),
    "fsdp": _shard,
}


def train(crew: Any, engine: str, spread: str, *, is_quick: bool) -> Block:
    """Steps of a training from the begin: forward, backward, SGD. All engines end with the same weights."""
    before, timed = (1, 2) if is_quick else (4, 12)
    model: nn.Module = make_model()
    if engine != ALONE:
        model = SPREADS[spread](model, crew.local.groups[engine])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    inputs = torch.randn(BATCH, _BATCH_FEATURES, generator=generator)
    labels = torch.randint(0, _CLASSES, (BATCH,), generator=generator)
    dist.barrier(crew.local.groups[OURS if engine == ALONE else engine])

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    seconds = median_seconds(step, before, timed)
    weights = [] if engine == ALONE else [_whole(parameter) for parameter in model.parameters()]
    return Block(seconds, digest(weights) if weights else "")


def _whole(parameter: Any) -> torch.Tensor:
    """A parameter, gathered if it is sharded."""
    whole: torch.Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach()
