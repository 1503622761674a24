"""The intended differences between torchcrew's DataLoader and stock's: the published list, each with its probe.

Everything that is not in this list is stock's; `test_differential.py` holds both to it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .observe import Scenario, describe_exception
from .scenario_values import ramp

__all__ = ("DEVIATIONS", "Deviation")


@dataclass(frozen=True)
class Deviation:
    """One intended difference."""

    name: str
    stock: str
    """What stock does."""
    ours: str
    """What torchcrew does instead."""
    why: str
    probe: Callable[[Any], Any]
    """Shows it: takes the class, returns plain data."""
    stock_sees: Any
    ours_sees: Any
    seconds: float = 15.0

    @property
    def scenario(self) -> Scenario:
        """The probe as a scenario."""
        return Scenario(self.probe, self.seconds)


def first(loader_class: Any, samples: list[Any], **options: Any) -> Any:
    """The first batch of one worker."""
    return next(iter(loader_class(samples, num_workers=1, **options)))


def is_shared(loader_class: Any) -> Any:
    return first(loader_class, [ramp(20_000)]).is_shared()


def array_after_sharing(loader_class: Any) -> Any:
    batch = first(loader_class, [ramp(20_000)])
    array = batch.numpy()
    batch.share_memory_()
    batch.fill_(7)
    return bool((array == 7).all())


def two_halves(samples: list[Any]) -> Any:
    base = torch.arange(40_000.0)
    return [base[:20_000], base[20_000:]]


def one_storage(loader_class: Any) -> Any:
    one, other = first(loader_class, [1], collate_fn=two_halves)
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def every_second(samples: list[Any]) -> Any:
    return [torch.arange(40_000.0)[::2]]


def gaps(loader_class: Any) -> Any:
    (view,) = first(loader_class, [1], collate_fn=every_second)
    return view.stride(), view[3].item()


def conjugate(samples: list[Any]) -> Any:
    return [torch.tensor([1 + 2j]).conj()]


def conjugated(loader_class: Any) -> Any:
    (tensor,) = first(loader_class, [1], collate_fn=conjugate)
    return complex(tensor[0].item())


def row_of_a_million(samples: list[Any]) -> Any:
    return [torch.zeros(1_000_000)[500:20_500]]


def storage_of_a_view(loader_class: Any) -> Any:
    (view,) = first(loader_class, [1], collate_fn=row_of_a_million)
    return view.untyped_storage().nbytes() > 4 * 20_000 + 64


def with_lambda(samples: list[Any]) -> Any:
    return [lambda: samples]


def unpicklable(loader_class: Any) -> Any:
    iterator = iter(loader_class([1, 2, 3, 4], num_workers=1, collate_fn=with_lambda))
    try:
        next(iterator)
    except Exception as error:
        return describe_exception(error)["type"]


def not_a_leaf(samples: list[Any]) -> Any:
    return torch.ones(3, requires_grad=True) * 2


def requires_grad(loader_class: Any) -> Any:
    try:
        next(iter(loader_class([1, 2], num_workers=1, collate_fn=not_a_leaf)))
    except Exception as error:
        return "Cowardly refusing to serialize non-leaf tensor" in str(error)


def local_error() -> Any:
    class Local(Exception):
        pass

    raise Local("of a local class")


class RaisesLocal(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return local_error()


def unpicklable_exception(loader_class: Any) -> Any:
    try:
        next(iter(loader_class(RaisesLocal(), num_workers=1)))
    except Exception as error:
        return "Local" in str(error)


def feeder_threads(loader_class: Any) -> Any:
    iterator = iter(loader_class(list(range(8)), num_workers=2))
    next(iterator)
    return sum("QueueFeeder" in thread.name for thread in threading.enumerate())


class Group(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return os.getpgrp()


def process_group(loader_class: Any) -> Any:
    return int(first(loader_class, Group())) == os.getpgrp()  # type: ignore[arg-type]


def leave(samples: list[Any]) -> Any:
    raise SystemExit(0)


def quiet_end(loader_class: Any) -> Any:
    start = time.monotonic()
    try:
        next(iter(loader_class([1], num_workers=1, collate_fn=leave)))
    except RuntimeError:
        return "after a poll" if time.monotonic() - start > 3 else "at once"


DEVIATIONS: tuple[Deviation, ...] = (
    Deviation(
        "is_shared",
        "`batch.is_shared()` is True: each tensor lies in a shared-memory file of its own.",
        "False: the batch is a view of a recycled block. `share_memory_()` copies it out.",
        "True would promise that sending the tensor on shares it, and a file for each tensor is what made stock slow.",
        is_shared, True, False,
    ),
    Deviation(
        "arrays taken before sharing",
        "An array made of a batch by `numpy()` goes on showing it after `share_memory_()` or `queue.put(batch)`, for "
        "the batch is shared already.",
        "These move the batch, as they move any tensor that is not shared, and the array shows memory that is used "
        "again. Share first, then call `numpy()`; or use `batch.clone()`.",
        "It is what torch does with every tensor that is not shared.",
        array_after_sharing, True, False,
    ),
    Deviation(
        "disjoint views",
        "Several tensors of a batch that are disjoint views of one storage arrive with one storage.",
        "Each arrives with its own storage. Tensors that overlap still share theirs.",
        "`torch.save` of one of them, and its lease, then cover that tensor only.",
        one_storage, True, False,
    ),
    Deviation(
        "views with gaps",
        "A view with gaps, as `x[::2]`, arrives with its strides and the whole storage behind it.",
        "It arrives compact: same values and shape, contiguous strides.",
        "The gaps hold data that nobody asked to send.",
        gaps, ((2,), 6.0), ((1,), 6.0),
    ),
    Deviation(
        "storage of a view",
        "A small view of a huge tensor brings the huge storage along.",
        "Only what the view shows is sent.",
        "It is what a user means, and the memory is the consumer's.",
        storage_of_a_view, True, False,
    ),
    Deviation(
        "conjugate views",
        "A tensor with the lazy conjugate or negative bit loses it on the way: `x.conj()` arrives as `x`.",
        "It arrives with the values that the worker saw.",
        "Wrong values help nobody.",
        conjugated, 1 + 2j, 1 - 2j,
    ),
    Deviation(
        "unpicklable batch",
        "A batch that cannot be pickled is lost in the worker's feeder thread, and the consumer waits forever.",
        "The pickling error is raised at once, where the batch would have come.",
        "A hang tells nobody what is wrong.",
        unpicklable, "hangs", "builtins.AttributeError", 4.0,
    ),
    Deviation(
        "non-leaf tensor",
        "A tensor that requires grad and is not a leaf is lost in the feeder thread, and the consumer waits forever.",
        "Stock's refusal (`Cowardly refusing to serialize non-leaf tensor ...`) is raised where the batch would come.",
        "A hang tells nobody what is wrong.",
        requires_grad, "hangs", True, 4.0,
    ),
    Deviation(
        "unpicklable exception",
        "An exception whose class cannot be pickled is lost in the feeder thread, and the consumer waits forever.",
        "An error whose text holds the original traceback is raised.",
        "A hang tells nobody what is wrong.",
        unpicklable_exception, "hangs", True, 4.0,
    ),
    Deviation(
        "feeder threads",
        "The user's process has one QueueFeederThread for each worker.",
        "It has none.",
        "Indices are written by the thread that asks for a batch.",
        feeder_threads, 2, 0,
    ),
    Deviation(
        "process group",
        "Workers are in the process group of the user's process.",
        "Each worker leads a process group of its own. Ctrl-Z and `fg` are passed on; Ctrl-C reaches the user's "
        "process, which ends them.",
        "What a worker started can then be ended with it, when it or the user's process is killed.",
        process_group, True, False,
    ),
    Deviation(
        "worker that leaves quietly",
        "A worker that ends with exit code 0 in the midst of its work is noticed after up to 5 s.",
        "At once, with the same error.",
        "The wait watches the worker itself.",
        quiet_end, "after a poll", "at once",
    ),
)  # fmt: skip
