"""`loader_stats` says what a clock beside the loop says."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from torchcrew.data import DataLoader, LoaderStats, stats
from torchcrew.data.stats import loader_stats


class Slow(Dataset[Any]):
    """Samples that cost processor time, as decoding does."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> torch.Tensor:
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            pass
        return torch.full((3, 32, 32), float(index))


@pytest.fixture(autouse=True)
def _only_this_tests_loaders() -> Iterator[None]:
    stats._records.clear()
    yield
    stats._records.clear()


def last() -> LoaderStats:
    return loader_stats()[-1]


@pytest.mark.parametrize("step", [0.0, 0.01])
def test_waiting_is_what_a_clock_says(step: float) -> None:
    """Also where the cores are busy, so that looking for a batch lasts until it is there."""
    waited = 0.0
    iterator = iter(DataLoader(Slow(0.003), batch_size=8, num_workers=2))
    while True:
        begin = time.perf_counter()
        if next(iterator, None) is None:
            break
        waited += time.perf_counter() - begin
        time.sleep(step)
    assert 0.7 * waited - 0.01 <= last().wait_s <= waited


def test_batches_are_the_delivered_ones() -> None:
    """Not those that workers made ahead and nobody took."""
    for number, _ in enumerate(DataLoader(Slow(0.0), batch_size=8, num_workers=2)):
        if number == 4:
            break
    assert last().batches == 5
    assert last().epochs == 1


def test_epochs_of_one_loader_add_up() -> None:
    """Whether its workers are kept or not; what is still iterated counts, too."""
    for persistent in (False, True):
        loader = DataLoader(Slow(0.0), batch_size=32, num_workers=2, persistent_workers=persistent)
        for _ in range(2):
            assert len(list(loader)) == 3
        assert (last().epochs, last().batches) == (2, 6)
        assert last().bytes >= 6 * 32 * 3 * 32 * 32 * 4
        assert last().busy_s > 0


def test_names() -> None:
    """The dataset's type, and of a wrapper what it wraps."""
    data = TensorDataset(torch.arange(4))
    list(DataLoader(data, num_workers=1))
    list(DataLoader(Subset(data, [1, 2]), num_workers=1))
    assert [entry.name for entry in loader_stats()] == ["TensorDataset", "Subset of TensorDataset"]
