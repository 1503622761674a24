"""Epoch after epoch: memory, address space and descriptors stay where they are."""

from __future__ import annotations

import json

import pytest

from tests.data.survival import MB, PROGRAMS, environment
from torchcrew.testing.crash import run_program


def soak(epochs: int, timeout: float, *options: str) -> None:
    result = run_program(PROGRAMS / "soak.py", str(epochs), *options, timeout=timeout, env=environment()).check()
    told = json.loads(result.stdout)
    warm = told[len(told) // 3 :]  # allocators and pools reach their sizes in the first epochs
    descriptors, private, shared, addresses = zip(*warm, strict=True)
    assert max(descriptors) - min(descriptors) <= 3, descriptors
    assert max(private[len(private) // 2 :]) - max(private[: len(private) // 2]) < 2 * MB, private
    assert max(shared) < 40 * MB, shared
    assert max(addresses[len(addresses) // 2 :]) - max(addresses[: len(addresses) // 2]) < 70 * MB, addresses


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "options",
    [(), pytest.param(("persistent", "holding"), marks=pytest.mark.faults)],
    ids=lambda options: "+".join(options) or "new crews",
)
def test_30_epochs(options: tuple[str, ...]) -> None:
    """Crews that end with the epoch, and one that stays while every fifth batch is held for two epochs."""
    soak(30, 50, *options)


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "options",
    [(), ("holding",), ("persistent",), ("persistent", "holding")],
    ids=lambda options: "+".join(options) or "new crews",
)
def test_200_epochs(options: tuple[str, ...]) -> None:
    """The same at length."""
    soak(200, 290, *options)
