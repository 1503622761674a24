"""Contexts whose children get shared memory in different ways."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest

from torchcrew.crew import zygote


@pytest.fixture(scope="module")
def _zygote_ends() -> Iterator[None]:
    yield
    zygote.stop()


@pytest.fixture(params=["fork", "zygote"])
def ctx(request: pytest.FixtureRequest, _zygote_ends: None) -> Any:
    """Contexts whose children get the memory by inheritance and by descriptor."""
    return zygote.get_context() if request.param == "zygote" else multiprocessing.get_context(request.param)


@pytest.fixture
def fork() -> Any:
    """The context "fork"."""
    return multiprocessing.get_context("fork")
