"""`DataLoader`'s surface, and `install`."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import threading
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import TensorDataset, default_collate

import torchcrew.data
from torchcrew.data import DataLoader
from torchcrew.data.iterator import CrewIterator
from torchcrew.errors import ArenaFull

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


class _Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of 400 kB."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((100_000,), float(index))


@pytest.mark.parametrize("budget", [1_600_000, 1_650_000, 1_700_000, 1_703_936, 1_710_000, 6_760_000, 10_169_680])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_budget_near_what_is_needed_is_used_or_refused(budget: int, workers: int) -> None:
    """Never a wait for room that cannot come: blocks are a little larger than what is in them."""
    held = []
    iterator = iter(DataLoader(_Rows(), batch_size=4, num_workers=workers, memory_budget=budget))
    with contextlib.suppress(ArenaFull, StopIteration):
        while True:
            held += [next(iterator)]
    for number, batch in enumerate(held):
        assert batch[:, 0].tolist() == [4.0 * number + k for k in range(4)]


def test_subclasses_of_the_iterator(installed: None) -> None:
    """Frameworks derive from the class they find in torch's module, also with arguments of their own."""

    class Iterator(torch.utils.data.dataloader._MultiProcessingDataLoaderIter):
        def __init__(self, loader: Any, extra: int = 0) -> None:
            super().__init__(loader)
            self.extra = extra

    iterator = Iterator(Stock(DATA, num_workers=1), extra=3)
    assert iterator.extra == 3
    assert len(list(iterator)) == 20


@dataclass(eq=True)
class Unhashable(DataLoader):  # type: ignore[type-arg]
    """A loader that is a dataclass, and so cannot be hashed."""

    size: int = 4

    def __post_init__(self) -> None:
        super().__init__(DATA, self.size, num_workers=1)


class Lazy(Images):
    """Opens what it wraps when a worker first needs it, and must not before."""

    @property
    def dataset(self) -> Any:
        raise KeyError("opened too early")


def test_bookkeeping_asks_nothing_of_the_user() -> None:
    """No hash of the loader, no attribute of the dataset that is computed."""
    assert len(list(Unhashable())) == 5
    assert len(list(DataLoader(Lazy(), batch_size=8, num_workers=1))) == 3


def _many_tensors(samples: list[Any]) -> Any:
    return {key: default_collate([torch.full((2100,), float(key + k)) for k in samples]) for key in range(3000)}


def test_thousands_of_tensors_of_unknown_size() -> None:
    """The first message has no size to go by; it takes a few blocks, not one per tensor."""
    (batch,) = DataLoader([0, 1], batch_size=2, num_workers=1, collate_fn=_many_tensors)
    assert all(tensor[:, 7].tolist() == [float(key), float(key + 1)] for key, tensor in batch.items())


def _fork_twice(samples: list[Any]) -> Any:
    child = os.fork()
    if not child:
        grandchild = os.fork()
        os._exit(0 if not grandchild else os.waitpid(grandchild, 0)[1])
    assert os.waitpid(child, 0)[1] == 0
    return default_collate(samples)


def test_a_worker_may_fork_and_fork_again(capfd: pytest.CaptureFixture[str]) -> None:
    """Its children have stock's way of allocating, and say nothing."""
    assert len(list(DataLoader(Images(), batch_size=8, num_workers=1, collate_fn=_fork_twice))) == 3
    assert capfd.readouterr().err == ""


def test_a_short_status_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's interval, which test suites shorten, may be shorter than ours."""
    monkeypatch.setattr(torch.utils.data._utils.worker, "MP_STATUS_CHECK_INTERVAL", 0.1)
    assert len(list(DataLoader(Images(), batch_size=8, num_workers=1))) == 3
