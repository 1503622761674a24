"""What `torch.distributed` offers, with all that programs give it: shapes, types, places in memory, groups, objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.collectives import surface_cases as cases
from tests.collectives.ranks import results_of
from torchcrew.crew import zygote


@pytest.fixture(scope="module", autouse=True)
def _zygote_ends() -> Iterator[None]:
    yield
    zygote.stop()


def _several(rank: int, size: int, functions: list[Callable[..., Any]]) -> None:
    for function in functions:
        function(rank, size)


def test_tensors_of_any_kind() -> None:
    """Of numpy's memory, with holes, without elements, with a gradient, of inference, conjugated, of every type."""
    functions = [cases.numpy_memory, cases.shapes, cases.autograd, cases.negated, cases.types]
    for ranks in (2, 3):
        results_of(_several, ranks, functions)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shared_tensors(ranks: int) -> None:
    """Of all, of some, of none of the ranks: reduced right, and not moved."""
    results_of(_several, ranks, [cases.shared, cases.short_lived])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_calls_of_any_kind(ranks: int) -> None:
    """Objects, asynchronous, coalesced, functional, in groups of few."""
    functions = [cases.objects, cases.asynchronous, cases.coalesced, cases.functions, cases.groups]
    results_of(_several, ranks, functions)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.faults)])
def test_a_mesh(ranks: int) -> None:
    """Rows and columns of ranks."""
    results_of(cases.mesh, ranks)


def test_eight_ranks() -> None:
    """More than there are cores."""
    results_of(_several, 8, [cases.shapes, cases.shared, cases.groups])


def test_nothing_is_left() -> None:
    """Of a group that is destroyed: memory, descriptors, threads."""
    assert results_of(cases.without_leaks, 3) == [[], [], []]
    assert results_of(cases.everything_destroyed, 2) == [[], []]


def test_a_rank_that_waits_sleeps() -> None:
    """It needs some hundredths of a processor at most."""
    _, *waiting = results_of(cases.idle, 3)
    assert max(waiting) <= 0.03
