"""The start method under test, and its end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torchcrew.crew import zygote


@pytest.fixture(scope="module")
def _zygote_ends() -> Iterator[None]:
    yield
    zygote.stop()


@pytest.fixture
def ctx(_zygote_ends: None) -> zygote.ZygoteContext:
    """The context "zygote"; the zygote is stopped after the module's tests."""
    return zygote.get_context()
