"""Ranks that call different things: all of them are told which, nothing is written, and the group goes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.collectives import mismatch_cases as cases
from tests.collectives.ranks import results_of
from torchcrew.crew import zygote


@pytest.fixture(scope="module", autouse=True)
def _zygote_ends() -> Iterator[None]:
    yield
    zygote.stop()


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_are_told_the_same(ranks: int) -> None:
    """In the same words, with each rank's call; then the group is used on."""
    by_rank = results_of(cases.mismatches, ranks)
    for results in zip(*by_rank, strict=True):
        assert len({text for _, _, text, _ in results}) == 1
        name, kind, text, _ = results[0]
        assert kind == "CollectiveMismatch", (name, text)
        assert "different collectives, or the same with different arguments" in text
        assert all(f"rank {rank}: " in text for rank in range(ranks))
        assert all(goes_on for *_, goes_on in results), name


def test_the_differences_are_named() -> None:
    """The collective, the size, the type, the operation, the root."""
    texts = {name: text for name, _, text, _ in results_of(cases.mismatches, 2)[0]}
    assert "rank 1: barrier" in texts["another collective"]
    assert "3 elements of torch.float32" in texts["another size"]
    assert "4 elements of torch.float32" in texts["another size"]
    assert "torch.int32" in texts["another type"]
    assert "reduction MAX" in texts["another operation"]
    assert "root 1" in texts["another root"]
    assert "rank 0: reduce of" in texts["broadcast for reduce"]


def test_nothing_is_written() -> None:
    """Tensors are what they were."""
    assert results_of(cases.untouched, 3) == [[float(rank)] * 2 for rank in range(3)]


def test_a_part_that_does_not_fit() -> None:
    """Sizes that only the receiver knows: it refuses, and the others do not wait for it."""
    for text in results_of(cases.a_part_of_another_size, 3):
        assert "rank 1 sends 16 bytes, but what rank " in text
