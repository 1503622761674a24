"""The differential suite: every scenario runs on stock's DataLoader and on ours; all that shows is compared."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch.utils.data

from torchcrew.data import DataLoader

from .deviations import DEVIATIONS, Deviation
from .observe import HANG, SCENARIOS, Scenario, differences, observe
from .scenarios import scenario_start

Stock = torch.utils.data.DataLoader
assert scenario_start  # importing the modules registers their scenarios

# A scenario runs twice, each time within its own deadline; the pytest timeout is only the net below.
NET_SECONDS = 200


#: Of families whose members take the same path the default run has these; the others run with those that are slow.
FEW = {
    "dtype_": ("bool", "int64", "uint16", "bfloat16", "complex64", "float8_e4m3fn"),
    "numpy_scalar_": ("?", "l", "d", "D"),
    "numpy_": ("?_bool", "l_int64", "e_float16", "g_float128", "S_bytes", "U_str", "O_object"),
    "worker_ends_": ("exit_3", "SystemExit_text", "9", "11"),
}
#: Slow ones of which the default run has something near enough.
RARE = ("samples_meta_tensors", "order_big_indices", "raises_zero_division", "raises_unicode_error", "raises_assertion")


def rare(name: str) -> bool:
    """Whether a scenario is left to `make test-faults`."""
    family = next((family for family in FEW if name.startswith(family)), None)
    return name in RARE or (family is not None and name.removeprefix(family) not in FEW[family])


def names(slow: bool) -> list[str]:
    return [name for name, one in SCENARIOS.items() if (one.slow or rare(name)) is slow]


def compare(scenario: Scenario) -> None:
    """Fail with the places where ours differs."""
    stock = observe(scenario, Stock)
    assert stock.value != HANG, f"stock hangs; such scenarios belong to the deviations\n{stock.stderr}"
    ours = observe(scenario, DataLoader)
    found = differences(stock, ours)
    assert not found, "\n".join([*found, f"stderr of ours: {ours.stderr[-3000:]}"])


@pytest.mark.timeout(NET_SECONDS)
@pytest.mark.parametrize("name", names(slow=False))
def test_is_stock(name: str) -> None:
    """Nothing that a user can observe tells ours from stock."""
    compare(SCENARIOS[name])


@pytest.mark.faults
@pytest.mark.timeout(NET_SECONDS)
@pytest.mark.parametrize("name", names(slow=True))
def test_is_stock_slowly(name: str) -> None:
    """The same for scenarios that wait for seconds: spawned workers, stock's polls."""
    compare(SCENARIOS[name])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("deviation", DEVIATIONS, ids=lambda deviation: deviation.name)
def test_deviates_as_published(deviation: Deviation) -> None:
    """Each published deviation is real, on both sides."""
    stock, ours = observe(deviation.scenario, Stock), observe(deviation.scenario, DataLoader)
    assert stock.value == deviation.stock_sees, stock.stderr
    assert ours.value == deviation.ours_sees, ours.stderr


def test_signature() -> None:
    """Stock's parameters in stock's order with stock's defaults; extras are keyword-only and attributes."""
    stock, ours = (inspect.signature(one.__init__).parameters for one in (Stock, DataLoader))
    assert [(p.name, p.kind, p.default) for p in stock.values()] == [
        (p.name, p.kind, p.default) for p in list(ours.values())[: len(stock)]
    ]
    loader: Any = DataLoader(range(3))
    for extra in list(ours.values())[len(stock) :]:
        assert extra.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
        assert extra.kind is inspect.Parameter.VAR_KEYWORD or hasattr(loader, extra.name)


def test_iterator_has_every_attribute() -> None:
    """``vars`` of our iterator and loader hold every name that stock's hold."""
    loaders = [one(range(4), num_workers=1) for one in (Stock, DataLoader)]
    iterators = [iter(one) for one in loaders]
    assert vars(loaders[0]).keys() <= vars(loaders[1]).keys()
    assert vars(iterators[0]).keys() <= vars(iterators[1]).keys()
    assert isinstance(iterators[1], torch.utils.data.dataloader._MultiProcessingDataLoaderIter)


def test_subscript() -> None:
    """``DataLoader[T]`` can be written."""
    assert DataLoader[int] is not None
