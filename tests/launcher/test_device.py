"""`torchcrew.device()`: the rank's GPU, or the CPU."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import torchcrew
from torchcrew.crew import rank


@pytest.fixture(autouse=True)
def _no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(rank, "_current", None)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have torch say that there are so many."""

    def have(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return have


@pytest.mark.parametrize(
    ("count", "local_rank", "own", "expected"),
    [
        (0, None, None, "cpu"),
        (0, "3", 2, "cpu"),
        (1, None, None, "cuda:0"),
        (4, None, None, "cuda:0"),
        (4, None, 3, "cuda:3"),
        (2, None, 3, "cuda:1"),
        (4, "2", 3, "cuda:2"),
        (4, " 5 ", None, "cuda:1"),
        (4, "", 1, "cuda:1"),
    ],
)
def test_which_device(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, count: int, local_rank: str | None, own: int | None, expected: str
) -> None:
    """The variable, then the spawn's number, modulo the visible GPUs."""
    gpus(count)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    if own is not None:
        rank.become(rank.Rank(own, 4))
    assert torchcrew.device() == torch.device(expected)


@pytest.mark.parametrize("text", ["one", "-1", "1.5"])
def test_a_variable_that_is_no_rank(gpus: Any, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """The message has its name and value."""
    gpus(2)
    monkeypatch.setenv("LOCAL_RANK", text)
    with pytest.raises(ValueError, match=f"LOCAL_RANK should be a number from 0 on, but is '{text}'"):
        torchcrew.device()


def test_ranks_of_a_spawn_know_their_number(gpus: Any) -> None:
    """By the fork, with the GPUs that this test pretends to have."""
    import torchcrew.multiprocessing as mp
    from tests.multiprocessing import spawn_cases as cases

    gpus(2)
    queue = mp.get_context("fork").SimpleQueue()
    with pytest.warns(RuntimeWarning) if _threads() else _nothing():
        mp.start_processes(cases.report_device, (queue,), 3, start_method="fork")
    found = sorted(queue.get() for _ in range(3))
    assert found == [(index, f"cuda:{index % 2}", rank.Rank(index, 3)) for index in range(3)]
    assert rank.current() is None


def _threads() -> bool:
    from torchcrew.multiprocessing.forking import dangers

    return bool(dangers())


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


def test_the_name_costs_no_torch() -> None:
    """It is imported when it is called."""
    code = "import sys, torchcrew; torchcrew.device; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=15)
