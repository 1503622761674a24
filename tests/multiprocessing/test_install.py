"""`install` puts our names under `torch.multiprocessing`, and `uninstall` takes them away."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator

import pytest
import torch.multiprocessing

import torchcrew.multiprocessing as mp
from torchcrew.multiprocessing.install import install, is_installed, uninstall

MODULES = [f"torch.multiprocessing{suffix}" for suffix in ("", ".spawn", ".pool", ".queue")]


@pytest.fixture
def installed() -> Iterator[None]:
    install()
    yield
    uninstall()


def snapshot() -> dict[str, dict[str, object]]:
    for name in MODULES:
        __import__(name)
    return {name: dict(vars(sys.modules[name])) for name in MODULES}


def test_there_and_back() -> None:
    """Twice each, in and out; nothing is left, and the module objects are the same all the time."""
    before, module = snapshot(), torch.multiprocessing
    uninstall()
    install()
    install()
    assert is_installed()
    assert sys.modules["torch.multiprocessing"] is torch.multiprocessing is module
    during = snapshot()
    assert during != before
    assert {name: set(names) for name, names in during.items()} == {name: set(names) for name, names in before.items()}
    uninstall()
    uninstall()
    assert not is_installed()
    assert snapshot() == before


def test_torchs_names_are_ours(installed: None) -> None:
    """The package and its submodules, spawn the function and spawn the module."""
    stock = torch.multiprocessing
    for name in ("Process", "Queue", "Pool", "Pipe", "get_context", "spawn", "start_processes", "set_start_method"):
        assert getattr(stock, name) == getattr(mp, name), name
    assert sys.modules["torch.multiprocessing.spawn"].spawn is mp.spawn  # type: ignore[attr-defined]
    assert sys.modules["torch.multiprocessing.pool"].Pool.__module__ == "torchcrew.multiprocessing.pool"  # type: ignore[attr-defined]
    assert type(stock.get_context("spawn")).__module__ == "torchcrew.multiprocessing.context"
    assert "zygote" in stock.get_all_start_methods()
    assert not hasattr(stock, "set_start")


def test_the_standard_library_stays(installed: None) -> None:
    """`multiprocessing` itself is nobody's to change; it only knows the zygote by name."""
    assert multiprocessing.Process.__module__ == "multiprocessing.context"
    assert type(multiprocessing.get_context("spawn")).__module__ == "multiprocessing.context"
    assert torch.multiprocessing.get_sharing_strategy.__module__ == "torch.multiprocessing"


def test_a_stock_loader_takes_our_contexts(installed: None) -> None:
    """Its argument names a start method, for which torch asks `torch.multiprocessing`."""
    from torch.utils.data import DataLoader

    loader = DataLoader([1, 2, 3], num_workers=1, multiprocessing_context="zygote")  # type: ignore[arg-type]
    assert loader.multiprocessing_context is mp.get_context("zygote")
