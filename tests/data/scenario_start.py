"""Scenarios about start methods. Spawned workers import torch anew, two seconds each: a chosen few only."""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch

from .observe import describe_exception, register, scenario, steps
from .scenario_errors import Raises
from .scenario_life import Inside
from .scenario_order import Draws, Stream
from .scenario_values import Made, Pair, as_list

__all__ = ("named_pairs",)


def named_pairs() -> list[Any]:
    return [Pair(torch.full((20_000,), i), {"n": i}) for i in range(4)]


def bad_value() -> None:
    raise ValueError("in a spawned worker")


def started(method: str, loader_class: Any) -> Any:
    """Values, draws, the worker's view of itself, an error, and the workers' ends, under one start method."""
    told: list[Any] = []
    context = multiprocessing.get_context(method)
    for one, given in (
        (Made(named_pairs), method),
        (Draws(), context),
        (Inside(), method),
        (Raises(bad_value), method),
    ):
        loader = loader_class(one, num_workers=1, collate_fn=as_list, multiprocessing_context=given)
        told.append((steps(loader, errors=1), type(loader.multiprocessing_context).__name__))
    return told


for _method in ("spawn", "forkserver"):
    register(f"started_by_{_method}", lambda c, m=_method: started(m, c), seconds=90, slow=True)


@scenario
def started_by_fork(loader_class: Any) -> Any:
    return started("fork", loader_class)


def cannot_be_pickled(method: str, loader_class: Any) -> Any:
    """An unpicklable dataset, collate function and init function: warning and error come from `iter`."""
    told = []
    for dataset, options in (
        ([lambda: 1], {}),
        (range(3), {"collate_fn": lambda samples: samples}),
        (range(3), {"worker_init_fn": lambda worker: None}),
    ):
        try:
            told.append(list(loader_class(dataset, num_workers=1, multiprocessing_context=method, **options)))
        except Exception as error:
            told.append(describe_exception(error))
            error.__traceback__ = None
    return told, len(multiprocessing.active_children())


for _method in ("spawn", "forkserver"):
    register(f"unpicklable_under_{_method}", lambda c, m=_method: cannot_be_pickled(m, c), seconds=60)


@scenario(slow=True, seconds=90)
def spawned_epochs(loader_class: Any) -> Any:
    """Persistent spawned workers over two epochs of a stream."""
    options = {"num_workers": 2, "multiprocessing_context": "spawn"}
    loader = loader_class(Draws(), persistent_workers=True, shuffle=True, collate_fn=as_list, **options)
    told = [steps(loader), steps(loader)]
    loader = loader_class(Stream((2, 1)), persistent_workers=True, **options)
    return [*told, steps(loader), steps(loader)]
