"""Scenarios about order, number, samplers, random draws, iterable datasets and DataPipes."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import ChainDataset, ConcatDataset, IterableDataset, Sampler, get_worker_info

from .observe import register, rng, scenario, steps
from .scenario_values import as_list

__all__ = ("Counting", "Draws", "Stream")


class Counting(Sampler[Any]):
    """A sampler with state: it counts what was drawn."""

    def __init__(self, indices: list[Any]) -> None:
        self.indices, self.drawn = indices, 0

    def __iter__(self) -> Iterator[Any]:
        for index in self.indices:
            self.drawn += 1
            yield index

    def __len__(self) -> int:
        return len(self.indices)


class Draws(torch.utils.data.Dataset[Any]):
    """Each sample draws from all three generators and says who drew."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        drawn = torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random(), torch.initial_seed()
        if info is None:
            return index, drawn
        return index, drawn, (info.id, info.num_workers, info.seed, type(info.dataset).__name__, info.worker_method)


class Keys(torch.utils.data.Dataset[Any]):
    """Echoes its index, whatever it is."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: Any) -> Any:
        return {"type": type(index).__name__, "index": index}


class Bulk(Keys):
    def __getitems__(self, indices: list[Any]) -> list[Any]:
        return [("bulk", type(indices).__name__, len(indices), index) for index in indices]


class Stream(IterableDataset[Any]):
    """Worker k yields ``lengths[k]`` numbers; reports ``length`` if it has one."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        for i in range(self.lengths[worker]):
            yield 100 * worker + i + 1000 * self.epoch


class Sized(Stream):
    def __len__(self) -> int:
        return 4


class Epochs(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.epoch, index, torch.rand(()).item()


class SlowFirst(torch.utils.data.Dataset[Any]):
    """Sample 0 takes so long that everything the other worker may do is done first."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.7 if index == 0 else 0)
        return index


def over(loader_class: Any, dataset: Any, count: int = 1, **options: Any) -> Any:
    """``count`` epochs of one loader, and its length if it has one."""
    loader = loader_class(dataset() if isinstance(dataset, type) else dataset, **options)
    told = [steps(loader) for _ in range(count)]
    try:
        told.append(("len", len(loader)))
    except Exception as error:
        told.append(("len raises", type(error).__name__, str(error)))
    return told, rng()


def nothing(worker_id: int) -> None:
    """A worker_init_fn that draws."""
    torch.rand(worker_id + 1)
    random.random()


def generator(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


OPTIONS: dict[str, tuple[Any, Callable[[], dict[str, Any]]]] = {
    "sequential": (range(11), lambda: {"batch_size": 3, "num_workers": 2}),
    "drop_last": (range(11), lambda: {"batch_size": 3, "num_workers": 2, "drop_last": True}),
    "shuffle": (range(11), lambda: {"batch_size": 2, "num_workers": 2, "shuffle": True}),
    "shuffle_with_generator": (
        range(11),
        lambda: {"batch_size": 2, "num_workers": 2, "shuffle": True, "generator": generator()},
    ),
    "no_workers": (range(5), lambda: {"num_workers": 0, "shuffle": True}),
    "more_workers_than_batches": (range(3), lambda: {"num_workers": 5}),
    "empty_dataset": ([], lambda: {"num_workers": 2}),
    "no_batching": (Keys, lambda: {"batch_size": None, "num_workers": 2}),
    "no_batching_of_bulk": (Bulk, lambda: {"batch_size": None, "num_workers": 2}),
    "getitems": (Bulk, lambda: {"batch_size": 4, "num_workers": 2}),
    "tensor_indices": (Keys, lambda: {"sampler": Counting([torch.tensor(3), torch.tensor([1, 2])]), "num_workers": 1}),
    "tuple_indices": (Keys, lambda: {"sampler": Counting([(1, 2), (3, "x")]), "num_workers": 2, "batch_size": 2}),
    "string_indices": (Keys, lambda: {"sampler": ["a", "b", "c"], "num_workers": 2, "batch_size": 2}),
    "big_indices": (Keys, lambda: {"sampler": [list(range(50_000)), 1], "num_workers": 1, "collate_fn": as_list}),
    "slices": (Keys, lambda: {"sampler": [slice(1, 3), None], "num_workers": 2, "collate_fn": as_list}),
    "batch_sampler": (Keys, lambda: {"batch_sampler": [[0, 1], [2], [], [3, 4, 5]], "num_workers": 2}),
    "bulk_sampler": (Keys, lambda: {"sampler": [[0, 1], [2, 3, 4]], "batch_size": None, "num_workers": 2}),
    "numpy_indices": (Keys, lambda: {"sampler": np.arange(4), "batch_size": 2, "num_workers": 2}),
    "draws": (Draws, lambda: {"batch_size": 2, "num_workers": 2, "collate_fn": as_list, "worker_init_fn": nothing}),
    "draws_of_three": (Draws, lambda: {"batch_size": 1, "num_workers": 3, "collate_fn": as_list}),
    "concat": (
        ConcatDataset([Keys(), Keys()]),
        lambda: {"batch_size": 5, "num_workers": 2},
    ),
    "weighted": (
        range(6),
        lambda: {"sampler": torch.utils.data.WeightedRandomSampler([1, 2, 3, 4, 5, 6], 8), "num_workers": 2},
    ),
    "iterable": (Stream((5, 5)), lambda: {"batch_size": 2, "num_workers": 2}),
    "iterable_unequal": (Stream((1, 7, 0)), lambda: {"batch_size": 2, "num_workers": 3}),
    "iterable_drop_last": (Stream((5, 3)), lambda: {"batch_size": 2, "num_workers": 2, "drop_last": True}),
    "iterable_all_empty": (Stream((0, 0)), lambda: {"num_workers": 2}),
    "iterable_no_batching": (Stream((3, 1)), lambda: {"batch_size": None, "num_workers": 2}),
    "iterable_length_warning": (Sized((3, 3)), lambda: {"batch_size": 2, "num_workers": 2}),
    "iterable_single": (Sized((6,)), lambda: {"num_workers": 0}),
    "chain": (ChainDataset([Stream((2, 2)), Stream((3, 1))]), lambda: {"batch_size": 2, "num_workers": 2}),
}
for _name, (_dataset, _options) in OPTIONS.items():
    register(
        f"order_{_name}",
        lambda c, d=_dataset, o=_options: (
            over(c, d, 2, **o()),
            over(c, d, 3, persistent_workers=True, prefetch_factor=3, **o()) if o()["num_workers"] else None,
        ),
    )


@scenario
def run_ahead(loader_class: Any) -> Any:
    """How many indices were drawn at each step, for several depths and numbers of workers."""
    told = []
    for workers, depth in ((1, 1), (2, None), (2, 1), (3, 5)):
        sampler = Counting(list(range(20)))
        loader = loader_class(range(20), sampler=sampler, num_workers=workers, prefetch_factor=depth)
        iterator = iter(loader)
        told.append([sampler.drawn] + [(next(iterator).tolist(), sampler.drawn) for _ in range(8)])
        told.append((iterator._num_yielded, len(iterator), iterator._send_idx))
    return told


@scenario
def interleaved_iterators(loader_class: Any) -> Any:
    """Three live iterators of two loaders, taken in turns; each has its own order."""
    one = loader_class(range(8), batch_size=2, shuffle=True, num_workers=2)
    other = loader_class(range(20, 26), batch_size=2, shuffle=True, num_workers=1)
    iterators = [iter(one), iter(other), iter(one)]
    told: list[Any] = [[i._base_seed for i in iterators]]
    told += [[(next(i).tolist(), rng()) for i in iterators] for _ in range(2)]
    del iterators[0]
    told += [[next(i).tolist() for i in iterators]]
    return told


@scenario
def nested_loops(loader_class: Any) -> Any:
    loader = loader_class(range(4), batch_size=2, num_workers=1)
    return [(a.tolist(), b.tolist()) for a in loader for b in loader]


@scenario
def persistent_epochs(loader_class: Any) -> Any:
    """Identity, seeds, stale datasets and draws over the epochs of persistent workers."""
    dataset = Epochs()
    loader = loader_class(dataset, num_workers=2, persistent_workers=True, shuffle=True, collate_fn=as_list)
    told, iterators = [], []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        iterator = iter(loader)
        iterators.append(iterator)
        told.append((iterator._base_seed, rng(), list(iterator), rng(), [w.is_alive() for w in iterator._workers]))
    return told, [i is iterators[0] for i in iterators], loader._iterator is iterators[0]


@scenario
def persistent_break(loader_class: Any) -> Any:
    """An epoch that was left early leaves nothing in the next one."""
    loader = loader_class(range(12), num_workers=2, persistent_workers=True, prefetch_factor=2)
    told = [steps(loader, limit=3), steps(loader), steps(loader, limit=1), steps(loader)]
    return told


@scenario
def persistent_iterable_break(loader_class: Any) -> Any:
    loader = loader_class(Stream((5, 2)), num_workers=2, persistent_workers=True)
    return [steps(loader, limit=3), steps(loader), steps(loader, limit=5), steps(loader)]


@scenario
def out_of_order_one_worker(loader_class: Any) -> Any:
    return [steps(loader_class(range(9), batch_size=2, num_workers=1, in_order=False)) for _ in range(2)]


@scenario
def out_of_order_two_workers(loader_class: Any) -> Any:
    """The slow sample comes last but one may be overtaken only by the other worker; all come."""
    loader = loader_class(SlowFirst(), num_workers=2, in_order=False)
    seen = [int(batch) for batch in loader]
    return seen[0], sorted(seen), seen.index(0) > 2


@scenario
def in_order_waits(loader_class: Any) -> Any:
    return [int(batch) for batch in loader_class(SlowFirst(), num_workers=2)]


@scenario
def growing_dataset(loader_class: Any) -> Any:
    data = [torch.tensor(i) for i in range(4)]
    loader = loader_class(data, num_workers=1)
    first = steps(loader), len(loader)
    data.append(torch.tensor(9))
    return first, steps(loader), len(loader)


def even(number: int) -> bool:
    return number % 2 == 0


@scenario
def datapipes(loader_class: Any) -> Any:
    """Iter and map pipes: sharding, shuffling with the shared seed, epochs."""
    from torch.utils.data.datapipes.iter import IterableWrapper
    from torch.utils.data.datapipes.map import SequenceWrapper

    told = []
    for persistent in (False, True):
        options = {"num_workers": 2, "persistent_workers": persistent}
        pipe = IterableWrapper(list(range(12))).shuffle().sharding_filter().filter(even)
        told.append(over(loader_class, pipe, 2, batch_size=2, shuffle=True, **options))
        plain = IterableWrapper(list(range(6)))
        told.append(over(loader_class, plain, 2, batch_size=None, **options))
        told.append(over(loader_class, SequenceWrapper(list(range(6))).map(str), 2, batch_size=2, **options))
    return told


def worker_offset(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.lengths = (worker_id + 1,) * 2  # type: ignore[attr-defined]


@scenario
def init_function_changes_the_dataset(loader_class: Any) -> Any:
    dataset = Stream((4, 4))
    told = steps(loader_class(dataset, num_workers=2, worker_init_fn=worker_offset))
    partial = functools.partial(worker_offset)
    return told, steps(loader_class(dataset, num_workers=2, worker_init_fn=partial)), dataset.lengths
