"""Scenarios about workers and iterators as things: names, attributes, when they start and end, threads, children."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import threading
import time
from typing import Any

import torch
from torch.utils.data import get_worker_info

from .observe import describe_exception, rng, scenario, steps
from .scenario_order import Stream
from .scenario_values import as_list

__all__ = ("Inside",)

# What frameworks read of an iterator and a loader: Lightning, accelerate, transformers, torchdata, ignite.
ITERATOR_ATTRIBUTES = (
    *("_base_seed", "_num_yielded", "_num_workers", "_prefetch_factor", "_in_order", "_timeout", "_persistent_workers"),
    *("_dataset_kind", "_IterableDataset_len_called", "_auto_collation", "_drop_last", "_world_size", "_rank"),
    *(
        "_pin_memory",
        "_pin_memory_device",
        "_worker_pids_set",
        "_shutdown",
        "_rcvd_idx",
        "_send_idx",
        "_workers_status",
    ),
    *("_workers_num_tasks", "_profile_name", "_shared_seed", "_worker_init_fn"),
)


class Inside(torch.utils.data.Dataset[Any]):
    """What a worker looks like from inside."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        me = multiprocessing.current_process()
        parent = multiprocessing.parent_process()
        assert info is not None
        assert parent is not None
        with open("/proc/self/comm") as comm:
            name = comm.read()
        return {
            "info": (info.id, info.num_workers, info.seed, info.rng, info.worker_method, type(info).__qualname__),
            "same dataset": info.dataset is self,
            "process": (me.name, me.daemon, me.exitcode, type(me).__name__),
            "parent": (parent.name, parent.pid == os.getppid()),
            "comm": name,
            "threads": (torch.get_num_threads(), threading.current_thread() is threading.main_thread()),
            "signals": [
                getattr(h := signal.getsignal(n), "__qualname__", str(h))
                for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
            ],
            "pid is new": os.getpid() != os.getppid(),
            "directory": os.getcwd() == os.environ.get("PWD", os.getcwd()),
            "in fork context": multiprocessing.get_start_method(),
            "nice": os.nice(0),
            "grad": torch.is_grad_enabled(),
        }


@scenario
def inside_a_worker(loader_class: Any) -> Any:
    return steps(loader_class(Inside(), num_workers=2, collate_fn=as_list))


@scenario
def workers_from_outside(loader_class: Any) -> Any:
    """Names, classes, pids, daemon flags; children of this process; what is alive when."""
    loader = loader_class(range(6), num_workers=3)
    before = multiprocessing.active_children()
    iterator = iter(loader)
    workers = iterator._workers
    told: list[Any] = [len(before), len(workers), loader._iterator is None]
    told.append([(w.name, w.daemon, w.is_alive(), w.exitcode, type(w).__name__, w.pid is not None) for w in workers])
    told.append(sorted(child.name for child in multiprocessing.active_children()))
    told.append([len({w.pid for w in workers}), [w.sentinel is not None for w in workers]])
    next(iterator)
    told.append([w.is_alive() for w in workers])
    rest = list(iterator)
    told.append((len(rest), [(w.is_alive(), w.exitcode) for w in workers], iterator._shutdown))
    try:
        next(iterator)
    except StopIteration:
        told.append("still at its end")
    return told


@scenario
def ends_when_dropped(loader_class: Any) -> Any:
    """Workers end with exit code 0 when the last reference to the iterator goes: del, break, an exception."""
    loader = loader_class(range(50), num_workers=2)
    iterator = iter(loader)
    workers = iterator._workers
    next(iterator)
    del iterator
    told: list[Any] = [[(w.is_alive(), w.exitcode) for w in workers]]
    for _ in loader:
        break
    told.append(len(multiprocessing.active_children()))
    iterator = iter(loader)
    workers = iterator._workers
    iterator._shutdown_workers()
    iterator._shutdown_workers()
    told.append([(w.is_alive(), w.exitcode) for w in workers])
    return told


@scenario
def persistent_workers_end_with_the_loader(loader_class: Any) -> Any:
    loader = loader_class(range(4), num_workers=2, persistent_workers=True)
    list(loader)
    workers = loader._iterator._workers
    told = [[(w.is_alive(), w.name) for w in workers]]
    del loader
    gc.collect()
    return told, [(w.is_alive(), w.exitcode) for w in workers]


@scenario
def worker_of_an_ended_stream(loader_class: Any) -> Any:
    """A worker whose stream has ended ends at once, with exit code 0; the others go on."""
    iterator = iter(loader_class(Stream((1, 6)), num_workers=2))
    told: list[Any] = [next(iterator).tolist() for _ in range(3)]
    workers = iterator._workers
    deadline = time.monotonic() + 5
    while workers[0].is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    told.append([(w.is_alive(), w.exitcode) for w in workers])
    told.append(iterator._workers_status)
    return told, [batch.tolist() for batch in iterator]


@scenario
def iterator_attributes(loader_class: Any) -> Any:
    """Every attribute that frameworks read, with its value."""
    loader = loader_class(range(6), num_workers=2, batch_size=2)
    iterator = iter(loader)
    next(iterator)
    told: dict[str, Any] = {name: repr(getattr(iterator, name)) for name in ITERATOR_ATTRIBUTES}
    told["bases"] = [one.__name__ for one in type(iterator).__mro__ if one.__module__ == "torch.utils.data.dataloader"]
    told["itself"] = iter(iterator) is iterator
    told["len"] = (len(iterator), len(loader))
    try:
        pickle.dumps(iterator)
    except NotImplementedError as error:
        told["pickle"] = repr(error)
    told["pin thread"] = hasattr(iterator, "_pin_memory_thread")
    return told


@scenario
def loader_attributes(loader_class: Any) -> Any:
    """Every attribute of a stock loader, with its value or type."""
    stock = torch.utils.data.DataLoader(range(6), num_workers=2)
    told = []
    for options in ({}, {"batch_sampler": [[1, 2]]}, {"batch_size": None}, {"num_workers": 0, "shuffle": True}):
        loader = loader_class(range(6), **{"num_workers": 2, **options})
        for name in sorted(vars(stock)):
            value = getattr(loader, name)
            told.append((name, value if isinstance(value, (int, bool, str, type(None))) else type(value).__name__))
        told.append((loader.multiprocessing_context, loader._auto_collation, type(loader._index_sampler).__name__))
    return told


@scenario
def in_a_thread(loader_class: Any) -> Any:
    """Made here, iterated in a thread; made and iterated in a thread; two threads at once."""
    told: dict[str, Any] = {}
    loader = loader_class(range(6), num_workers=2)

    def run(name: str, one: Any) -> None:
        told[name] = steps(one, with_rng=False)

    for pair in ((loader,), (loader, loader_class(range(10, 14), num_workers=1))):
        threads = [threading.Thread(target=run, args=(f"{len(pair)} {i}", one)) for i, one in enumerate(pair)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    return dict(sorted(told.items()))


def iterate_in_child(loader: Any, queue: Any) -> None:
    torch.set_num_threads(1)
    queue.put([steps(loader, with_rng=False), [len(multiprocessing.active_children())]])


@scenario
def in_a_child(loader_class: Any) -> Any:
    """A loader used in a non-daemonic child works; in a daemonic child stock's error says why not."""
    context = multiprocessing.get_context("fork")
    told = []
    for daemon in (False, True):
        queue = context.SimpleQueue()
        loader = loader_class(range(6), num_workers=2)
        child = context.Process(target=iterate_in_child, args=(loader, queue), daemon=daemon)
        child.start()
        told.append(queue.get())
        child.join(10)
        told.append(child.exitcode)
    return told


@scenario
def live_iterator_over_a_fork(loader_class: Any) -> Any:
    """A child that is forked while an iterator lives does not disturb it, whether it drops it or not."""
    loader = loader_class([torch.full((20_000,), i) for i in range(12)], num_workers=2)
    iterator = iter(loader)
    held = next(iterator)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0.2,))
    child.start()
    told = [int(batch[0, 5]) for batch in iterator]
    child.join(10)
    return told, child.exitcode, int(held[0, 7])


def closing(kind: str, loader: Any) -> None:
    raise ValueError(kind)


@scenario
def exception_in_the_loop(loader_class: Any) -> Any:
    """An exception of the user's own loop body leaves no worker once it is handled."""
    loader = loader_class(range(30), num_workers=2)
    try:
        for batch in loader:
            closing(str(batch), loader)
    except ValueError as error:
        told = describe_exception(error)
        error.__traceback__ = None
    return told, len(multiprocessing.active_children()), rng()


@scenario
def profiler_label(loader_class: Any) -> Any:
    """The span that the profiler shows for a step."""
    loader = loader_class(range(3), num_workers=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        list(loader)
    return sorted((e.key, e.count) for e in profile.key_averages() if "DataLoader" in e.key)


@scenario
def many_workers_warning(loader_class: Any) -> Any:
    """More workers than cores: stock's advice, at construction and at each iter."""
    loader = loader_class(range(4), num_workers=9)
    return [steps(loader), steps(loader)]


@scenario
def replaced_attributes(loader_class: Any) -> Any:
    """What a framework sets on a finished loader counts at the next iter."""
    loader = loader_class(range(6), num_workers=0)
    loader.num_workers, loader.prefetch_factor, loader.collate_fn = 2, 2, as_list
    iterator = iter(loader)
    return [len(iterator._workers), *iterator]


@scenario
def subclass_and_get_iterator(loader_class: Any) -> Any:
    """A subclass that wraps ``__iter__``, and a copy of a loader."""
    import copy

    class Mine(loader_class):  # type: ignore[misc,valid-type]
        def __iter__(self) -> Any:
            return ((i, batch) for i, batch in enumerate(super().__iter__()))

    loader = Mine(range(4), num_workers=2)
    return [(i, b.tolist()) for i, b in loader], [(i, b.tolist()) for i, b in copy.copy(loader)]
