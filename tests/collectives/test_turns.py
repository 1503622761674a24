"""`turns`: what is written before a turn is read behind it, and at no other time; who is late, and who is gone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.collectives import turn_cases as cases
from tests.collectives.ranks import results_of
from torchcrew.crew import zygote


@pytest.fixture(scope="module", autouse=True)
def _zygote_ends() -> Iterator[None]:
    yield
    zygote.stop()


@pytest.mark.parametrize(("ranks", "count"), [(1, 100), (2, 2000), (5, 500)])
def test_everybody_reads_what_was_written(ranks: int, count: int) -> None:
    """However slow some are: a fast one does not write what a slow one still reads."""
    assert results_of(cases.pages, ranks, count) == [0] * ranks


def test_turns_are_counted() -> None:
    """All that a group has taken, for those who say who is late."""
    for number, said in results_of(cases.counted, 3):
        assert min(said) >= number - 1
        assert max(said) <= number + 1


def test_a_rank_that_gives_up() -> None:
    """The first reason counts; those that wait are told at once, those that come later when they come."""
    (own, first, again), (reason, _, _), (_, late, _) = results_of(cases.given_up, 3)
    assert reason == "enough"
    assert first.startswith("PeerDied: rank 1 (pid ")
    assert first.endswith("failed in a collective of this group: enough")
    assert "enough" in own
    assert "cannot be used any more: PeerDied: rank 1" in again
    assert late.startswith("PeerDied: rank ")
