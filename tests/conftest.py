"""What every test shares. The leak check comes with the plugin named in pyproject.toml."""

import faulthandler
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Examples that start processes take as long as the machine lets them; pytest's timeout bounds the whole test.
settings.register_profile("torchcrew", deadline=None, print_blob=True)
settings.load_profile("torchcrew")


@pytest.fixture
def _no_stack_dumps() -> Iterator[None]:
    """Children that crash on purpose shall not print pytest's stack."""
    enabled = faulthandler.is_enabled()
    faulthandler.disable()
    yield
    if enabled:
        faulthandler.enable(file=sys.__stderr__)
