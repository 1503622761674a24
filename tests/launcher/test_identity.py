"""`rank()`, `local_rank()` and `world_size()`: who this process is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

import torchcrew
from torchcrew.crew import rank as ranks

NAMES = {"RANK": torchcrew.rank, "LOCAL_RANK": torchcrew.local_rank, "WORLD_SIZE": torchcrew.world_size}


@pytest.fixture(autouse=True)
def _nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ranks, "_current", None)


def who() -> tuple[int, int, int]:
    return torchcrew.rank(), torchcrew.local_rank(), torchcrew.world_size()


def test_a_process_by_itself() -> None:
    """The only one."""
    assert who() == (0, 0, 1)


def test_ranks_of_a_spawn() -> None:
    """The number that they were given."""
    ranks.become(ranks.Rank(2, 4))
    assert who() == (2, 2, 4)


def test_the_environment_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also each variable by itself; an empty one is none."""
    ranks.become(ranks.Rank(2, 4))
    monkeypatch.setenv("RANK", "7")
    assert who() == (7, 2, 4)
    monkeypatch.setenv("WORLD_SIZE", " 8 ")
    monkeypatch.setenv("LOCAL_RANK", "")
    assert who() == (7, 2, 8)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert who() == (7, 3, 8)


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
def test_the_process_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It comes before the number of a spawn, and knows nothing of this machine."""
    ranks.become(ranks.Rank(2, 4))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        assert who() == (0, 2, 1)
        monkeypatch.setenv("RANK", "1")
        assert who() == (1, 2, 1)
    finally:
        dist.destroy_process_group()
        monkeypatch.setattr(sys, "excepthook", hook)
    monkeypatch.delenv("RANK")
    assert who() == (2, 2, 4)


@pytest.mark.parametrize("text", ["one", "-1", "1.5", " ", "0x1"])
@pytest.mark.parametrize("name", NAMES)
def test_a_variable_that_is_no_number(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    """The message has its name and value."""
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"variable {name} should be a number from [01] on, but is '{text}'"):
        NAMES[name]()


def test_there_is_no_job_of_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size of 0 is an error, a rank 0 is not."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "0")
    assert torchcrew.rank() == 0
    with pytest.raises(ValueError, match="WORLD_SIZE should be a number from 1 on, but is '0'"):
        torchcrew.world_size()


@pytest.mark.parametrize("function", NAMES.values())
def test_the_names(function: Callable[[], int]) -> None:
    """They are public, by the name that they have."""
    assert function.__name__ in torchcrew.__all__
    assert getattr(torchcrew, function.__name__) is function


def test_who_asks_needs_no_torch() -> None:
    """Nor does it import it."""
    code = "import sys, torchcrew as t; assert (t.rank(), t.local_rank(), t.world_size()) == (0, 0, 1)"
    subprocess.run([sys.executable, "-c", code + "; assert 'torch' not in sys.modules"], check=True, timeout=15)
