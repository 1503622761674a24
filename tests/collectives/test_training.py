"""What trains through a group: the weights are those that gloo gives, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.collectives import training_cases as cases
from tests.collectives.ranks import results_of
from torchcrew.crew import zygote


@pytest.fixture(scope="module", autouse=True)
def _zygote_ends() -> Iterator[None]:
    yield
    zygote.stop()


def test_data_parallel() -> None:
    """20 steps of DistributedDataParallel, with its default and its best settings."""
    assert results_of(cases.data_parallel, 2) == [[], []]


def test_data_parallel_now_and_then() -> None:
    """Gradients that are accumulated and compressed, and ranks with more batches than others."""
    assert results_of(cases.without_synchronisation, 2) == [[True], [True]]


def test_a_sharded_optimizer() -> None:
    """ZeroRedundancyOptimizer."""
    assert results_of(cases.sharded_optimizer, 2) == [True, True]


def test_fully_sharded() -> None:
    """FSDP2: 20 steps, equal losses."""
    assert results_of(cases.fully_sharded, 2) == [True, True]
