"""Scenarios about errors: in the dataset, the collate function, the options; and ends of workers."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate

from .observe import describe_exception, register, scenario, steps
from .scenario_order import Stream

__all__ = ("Raises", "Several")


class Several(Exception):
    """An exception that cannot be made from one string."""

    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"{code} at {where}")
        self.code, self.where = code, where


class WithMessage(Exception):
    def __init__(self, text: str, message: str = "none") -> None:
        super().__init__(text)
        self.message = message


class Noted(ValueError):
    def __str__(self) -> str:
        return "its own text"


class Raises(torch.utils.data.Dataset[Any]):
    """Sample ``at`` does something bad; the others are their index."""

    def __init__(self, bad: Any, at: int = 3, count: int = 8) -> None:
        self.bad, self.at, self.count = bad, at, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            self.bad()
        return index


class RaisesInIter(IterableDataset[Any]):
    def __init__(self, early: bool) -> None:
        self.early = early

    def __iter__(self) -> Iterator[int]:
        if self.early:
            raise ValueError("in __iter__")
        return self.run()

    def run(self) -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("in the stream")


class BadLength(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        raise ValueError("in __len__")

    def __getitem__(self, index: int) -> int:
        return index


def throw(error: Any) -> None:
    raise error() if isinstance(error, type) else error


def chained() -> None:
    try:
        {}["missing"]
    except KeyError as error:
        raise RuntimeError("outer") from error


def noted() -> None:
    error = ValueError("with notes")
    error.__notes__ = ["a note"]  # what 3.11's add_note does
    raise error


RAISED: dict[str, Any] = {
    "value_error": functools.partial(throw, ValueError("bad value %s")),
    "key_error": functools.partial(throw, KeyError("some key")),
    "key_error_of_number": functools.partial(throw, KeyError(3)),
    "index_error": functools.partial(throw, IndexError("out")),
    "stop_iteration": functools.partial(throw, StopIteration),
    "stop_async": functools.partial(throw, StopAsyncIteration),
    "generator_exit_like": functools.partial(throw, NotImplementedError),
    "os_error": functools.partial(throw, OSError(2, "No such file", "name")),
    "unicode_error": lambda: b"\xff".decode(),
    "assertion": functools.partial(throw, AssertionError),
    "several_arguments": functools.partial(throw, Several(3, "here")),
    "with_message": functools.partial(throw, WithMessage("text")),
    "own_text": functools.partial(throw, Noted("hidden")),
    "chained": chained,
    "noted": noted,
    "zero_division": lambda: 1 // 0,
    "out_of_memory": functools.partial(throw, MemoryError),
    "recursion": functools.partial(throw, RecursionError("deep")),
    "timeout": functools.partial(throw, TimeoutError("slow")),
    "warning_as_error": functools.partial(throw, UserWarning("as an error")),
    "torch_error": lambda: torch.zeros(2) @ torch.zeros(3),
    "queue_empty": lambda: __import__("queue").Queue().get_nowait(),
    "eof": functools.partial(throw, EOFError("end")),
    "broken_pipe": functools.partial(throw, BrokenPipeError("pipe")),
}


def in_dataset(bad: Any, loader_class: Any) -> Any:
    """The error comes at its place; what follows comes as well; also without batching."""
    dataset = Raises(bad)
    return [
        steps(loader_class(dataset, batch_size=2, num_workers=2)),
        steps(loader_class(dataset, batch_size=None, num_workers=1)),
    ]


for _name, _bad in RAISED.items():
    register(f"raises_{_name}", functools.partial(in_dataset, _bad))


def bad_collate(samples: list[Any]) -> Any:
    if 3 in samples:
        raise ValueError("in collate")
    return default_collate(samples)


def bad_init(worker_id: int) -> None:
    if worker_id == 1:
        raise ValueError("in worker_init_fn")


@scenario
def raises_elsewhere(loader_class: Any) -> Any:
    """In collate_fn, worker_init_fn, ``__iter__``, the stream, ``__len__``, and the sampler."""
    told = [steps(loader_class(range(8), batch_size=2, num_workers=2, collate_fn=bad_collate))]
    told.append(steps(loader_class(range(4), num_workers=2, worker_init_fn=bad_init), errors=0))
    told += [steps(loader_class(RaisesInIter(early), num_workers=2), errors=1) for early in (True, False)]
    for options in ({}, {"sampler": bad_sampler()}):
        try:
            told.append(steps(loader_class(BadLength(), num_workers=2, **options)))
        except Exception as error:
            told.append(describe_exception(error))
    return told


def bad_sampler() -> Iterator[int]:
    yield from range(7)
    raise ValueError("in the sampler")


@scenario
def persistent_errors(loader_class: Any) -> Any:
    """An epoch with errors, and the next one."""
    loader = loader_class(Raises(RAISED["value_error"]), batch_size=2, num_workers=2, persistent_workers=True)
    told = [steps(loader), steps(loader)]
    loader = loader_class(RaisesInIter(False), num_workers=2, persistent_workers=True)
    return [*told, steps(loader, errors=5), steps(loader, errors=5)]


def end(how: str) -> None:
    time.sleep(0.3)  # stock loses the batch before if its worker dies while that one is still on its way
    if how == "exit 3":
        os._exit(3)
    elif how == "SystemExit 3":
        raise SystemExit(3)
    elif how == "SystemExit text":
        raise SystemExit("a text")
    elif how == "SystemExit 0":
        raise SystemExit(0)
    elif how == "KeyboardInterrupt":
        raise KeyboardInterrupt
    elif how.isdigit():
        os.kill(os.getpid(), int(how))
        time.sleep(5)


def ends(how: str, loader_class: Any) -> Any:
    """A worker that ends in the midst of things: type, text and cause of the error, and the worker's exit code."""
    loader = loader_class(Raises(functools.partial(end, how), at=2, count=4), num_workers=1, prefetch_factor=1)
    iterator = iter(loader)
    told = [next(iterator).tolist(), next(iterator).tolist()]
    try:
        next(iterator)
    except Exception as error:
        told.append(describe_exception(error))
    worker = iterator._workers[0]
    return told, worker.exitcode, worker.is_alive()


for _how in ("exit 3", "SystemExit 3", "SystemExit text", "9", "15", "11", "6"):
    register(f"worker_ends_{_how.replace(' ', '_')}", functools.partial(ends, _how), seconds=25)
for _how in ("SystemExit 0", "KeyboardInterrupt"):
    register(f"worker_ends_{_how.replace(' ', '_')}", functools.partial(ends, _how), seconds=25, slow=True)


def sleep_long() -> None:
    time.sleep(1.5)


@scenario(seconds=25)
def timeout(loader_class: Any) -> Any:
    """The timeout's error, and going on after it."""
    loader = loader_class(Raises(sleep_long, at=1, count=4), num_workers=1, timeout=1, prefetch_factor=1)
    return steps(loader)


WRONG: list[dict[str, Any]] = [
    {"num_workers": -1},
    {"timeout": -1},
    {"prefetch_factor": 2},
    {"num_workers": 1, "prefetch_factor": -1},
    {"num_workers": 1, "prefetch_factor": 0},
    {"persistent_workers": True},
    {"sampler": [1], "shuffle": True},
    {"batch_sampler": [[1]], "batch_size": 2},
    {"batch_sampler": [[1]], "shuffle": True},
    {"batch_size": None, "drop_last": True},
    {"batch_size": 0},
    {"batch_size": -2},
    {"batch_size": "x"},
    {"shuffle": "yes"},
    {"multiprocessing_context": "fork"},
    {"num_workers": 1, "multiprocessing_context": "sideways"},
    {"num_workers": 1, "multiprocessing_context": 3},
    {"num_workers": 1, "unknown_option": 3},
    {"num_workers": "two"},
    {"num_workers": 1.5},
    {"generator": 5, "num_workers": 1},
    {"pin_memory": True, "pin_memory_device": "cuda", "num_workers": 1},
    {"num_workers": 1, "worker_init_fn": 3},
    {"num_workers": 1, "collate_fn": 3},
]


@scenario(seconds=25)
def wrong_options(loader_class: Any) -> Any:
    """Every wrong option is refused with stock's words, when stock refuses it."""
    told: list[Any] = []
    for options in WRONG:
        for dataset in (range(3), Stream((2, 2))):
            try:
                told.append(steps(loader_class(dataset, **options), errors=0))
            except Exception as error:
                told.append((type(error).__name__, str(error).replace(loader_class.__name__, "DataLoader")))
    return told


@scenario
def frozen_attributes(loader_class: Any) -> Any:
    """Attributes that cannot be set after construction, and those that can."""
    loader = loader_class(range(4), num_workers=2)
    told = []
    for name in ("batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers", "num_workers"):
        try:
            setattr(loader, name, 1)
            told.append((name, "set"))
        except ValueError as error:
            told.append((name, str(error)))
    loader.worker_init_fn = bad_init
    try:
        loader.multiprocessing_context = "sideways"
    except ValueError as error:
        told.append(("context", str(error)))
    loader.multiprocessing_context = "fork"
    return told, type(loader.multiprocessing_context).__name__
