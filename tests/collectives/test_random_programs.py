"""Random collectives, in random order, with random delays and places of tensors, bit for bit against one process."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from tests.collectives.random_cases import play
from tests.collectives.ranks import results_of
from torchcrew.crew import zygote


@pytest.fixture(scope="module", autouse=True)
def _zygote_ends() -> Iterator[None]:
    yield
    zygote.stop()


def check(ranks: int, count: int, pause: float, within: float, seed: int = 0) -> None:
    """Play a program; a seed of 0: a new one."""
    seed = seed or secrets.randbits(32)
    found = results_of(play, ranks, seed, count, pause, timeout=min(within / 2, 60.0), within=within)
    assert found == [[]] * ranks, f"seed={seed}: {found}"


@pytest.mark.parametrize(("ranks", "count"), [(1, 60), (2, 150), (3, 100), (4, 80), (8, 25)])
def test_some(ranks: int, count: int) -> None:
    """Of every kind, type and size; synchronous or not, in the whole group or among some."""
    check(ranks, count, pause=0.001, within=18.0)


@pytest.mark.faults
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ten_thousand(ranks: int) -> None:
    """The same for long."""
    check(ranks, 10_000, pause=0.002, within=850.0)


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_sixty_four_ranks() -> None:
    """Many more than there are cores."""
    check(64, 60, pause=0.001, within=280.0)
