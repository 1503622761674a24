"""`DataLoader`'s surface, and `install`."""

from __future__ import annotations

import gc
import inspect
import threading
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import TensorDataset, default_collate

import torchcrew.data
from torchcrew.data import DataLoader
from torchcrew.data.iterator import CrewIterator

Stock = torch.utils.data.DataLoader
DATA = TensorDataset(torch.arange(40.0).view(20, 2))


def test_signature_is_stocks_plus_ours_at_the_end() -> None:
    """Names, order, kinds and defaults of every argument are stock's; ours are keyword-only and come last."""
    stock = list(inspect.signature(Stock).parameters.values())
    ours = list(inspect.signature(DataLoader).parameters.values())
    assert [(p.name, p.kind, p.default) for p in ours[: len(stock)]] == [(p.name, p.kind, p.default) for p in stock]
    assert [p.name for p in ours[len(stock) :]] == ["memory_budget", "newer"]
    assert ours[len(stock)].kind is inspect.Parameter.KEYWORD_ONLY


def test_every_option_is_an_attribute_of_its_name() -> None:
    """Frameworks re-create a loader from its attributes."""
    loader = DataLoader(DATA, num_workers=1, memory_budget="1GB")
    for name in inspect.signature(DataLoader).parameters:
        assert name in ("shuffle", "newer") or hasattr(loader, name)
    assert loader.memory_budget == "1GB"


@pytest.mark.parametrize("value", [0, -1, "many", "", True, 1e30, [], "1.2.3GB"])
def test_a_wrong_budget_names_the_option(value: Any) -> None:
    """A `ValueError` says which option and what it allows, when the loader is made."""
    with pytest.raises(ValueError, match=r"memory_budget should be a positive number of bytes or a size"):
        DataLoader(DATA, num_workers=1, memory_budget=value)


def test_unknown_options_are_refused() -> None:
    """What this release of torch does not know either is a `TypeError`."""
    with pytest.raises(TypeError, match="nun_workers"):
        DataLoader(DATA, nun_workers=2)


def test_without_workers_it_is_stocks() -> None:
    """`num_workers=0` takes stock's in-process iterator."""
    assert type(iter(DataLoader(DATA))).__name__ == "_SingleProcessDataLoaderIter"


def test_the_iterator_is_a_stock_iterator() -> None:
    """Frameworks test for torch's class, and the profiler prints its name."""
    iterator = iter(DataLoader(DATA, num_workers=1))
    assert isinstance(iterator, torch.utils.data.dataloader._MultiProcessingDataLoaderIter)
    assert type(iterator).__name__ == "_MultiProcessingDataLoaderIter"


@pytest.fixture
def installed() -> Any:
    torchcrew.data.install()
    yield
    torchcrew.data.uninstall()


class Sub(Stock):  # type: ignore[type-arg]
    """A framework's subclass."""


def test_install_reaches_existing_loaders_and_subclasses() -> None:
    """Loaders made before `install`, and classes derived from stock's, run on the engine; `uninstall` undoes it."""
    loaders = [Stock(DATA, num_workers=1), Sub(DATA, num_workers=1)]
    torchcrew.data.install()
    torchcrew.data.install()
    try:
        for loader in loaders:
            iterator = iter(loader)
            assert isinstance(iterator, CrewIterator)
            assert len(list(iterator)) == 20
    finally:
        torchcrew.data.uninstall()
    assert not isinstance(iter(loaders[0]), CrewIterator)


def _profiled_names(loader: Any) -> list[str]:
    with torch.autograd.profiler.profile() as profile:
        list(loader)
    return sorted({event.name for event in profile.function_events if "DataLoader" in event.name})


def test_profiler_spans_are_stocks() -> None:
    """While a profiler records, each batch has stock's span."""
    assert _profiled_names(DataLoader(DATA, num_workers=1)) == _profiled_names(Stock(DATA, num_workers=1))


Point = namedtuple("Point", "x y")


def _collate_points(samples: list[Any]) -> Any:
    return Point(default_collate([s[0] for s in samples]), [default_collate(samples), {"n": len(samples)}])


class Images(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Images whose batches are far above what travels inline."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 32, 32), float(index)), index


def test_a_user_collate_that_calls_default_collate() -> None:
    """It lands in shared memory without a second copy, whatever it is wrapped in, and the types are kept."""
    for k, batch in enumerate(DataLoader(Images(), batch_size=8, num_workers=2, collate_fn=_collate_points)):
        assert type(batch) is Point
        images, [[again, labels], count] = batch
        assert torch.equal(images[:, 0, 0, 0], torch.arange(8.0) + 8 * k)
        assert torch.equal(again, images)
        assert labels.tolist() == list(range(8 * k, 8 * k + 8))
        assert count == {"n": 8}


class Caching(Images):
    """Returns one batch again and again, from the worker's own memory of it."""

    def __init__(self) -> None:
        self.kept: Any = None

    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


class CachingCollate:
    """Keeps the first batch in the worker and sends a copy of it beside every later one."""

    def __init__(self) -> None:
        self.first: Any = None

    def __call__(self, samples: list[Any]) -> Any:
        batch = default_collate(samples)
        if self.first is None:
            self.first = batch
        return [self.first[0], batch[0]]


def test_a_batch_cached_in_the_worker_keeps_its_bytes() -> None:
    """A block that the worker itself still sees is not written again, also when the trainer has dropped it."""
    loader = DataLoader(Images(), batch_size=2, num_workers=1, collate_fn=CachingCollate())
    for k, (first, batch) in enumerate(loader):
        assert torch.equal(first[:, 0, 0, 0], torch.tensor([0.0, 1.0]))
        assert torch.equal(batch[:, 0, 0, 0], torch.tensor([2.0 * k, 2.0 * k + 1]))
        del first, batch


def test_in_a_thread() -> None:
    """A loader may live in a thread that ends before the program does."""
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.extend(len(b[0]) for b in DataLoader(Images(), 8, num_workers=2)))
    thread.start()
    thread.join(15)
    assert seen == [8, 8, 8]


def test_a_cycle_with_the_iterator_is_collected() -> None:
    """The cyclic collector ends the workers, and the arenas it puts back are usable afterwards."""
    for _ in range(3):
        iterator = iter(DataLoader(Images(), batch_size=8, num_workers=2))
        next(iterator)
        cycle: list[Any] = [iterator]
        cycle.append(cycle)
        del iterator, cycle
        gc.collect()
        assert [int(labels[0]) for _, labels in DataLoader(Images(), batch_size=8, num_workers=2)] == [0, 8, 16]
