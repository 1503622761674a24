"""Two ranks, the same calls to `crew` and to gloo: equal bits, and the same errors where torch itself refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.collectives import gloo_cases as cases
from tests.collectives.ranks import results_of
from torchcrew.crew import zygote


@pytest.fixture(scope="module", autouse=True)
def _zygote_ends() -> Iterator[None]:
    yield
    zygote.stop()


def test_reductions() -> None:
    """all_reduce, reduce, reduce_scatter: every type and operation that gloo has, below and above a page."""
    assert results_of(cases.reductions, 2) == [[], []]


def test_copies() -> None:
    """broadcast, gather, scatter, all_to_all and the rest, of every type and of any shape."""
    assert results_of(cases.copies, 2) == [[], []]


def test_errors() -> None:
    """Whatever gloo refuses is refused; by torch itself: in the same words; and the group can be used on."""
    for found in results_of(cases.errors, 2):
        by_torch = [name for name, ours, theirs in found if ours == theirs and ours != "done"]
        assert by_torch[:5] == list(cases._WRONG)[:5]
        for name, ours, theirs in found[:-1]:
            assert (ours == "done") == (theirs == "done"), (name, ours, theirs)
        _, ours, expected = found[-1]
        assert ours == expected
