"""A pytest plugin: a test that leaves something behind fails, and the report says what.

Load it with ``-p torchcrew.testing.plugin``. Every test is compared with its own beginning, so a leak fails the test
that made it and no later one; what fixtures of a wider scope set up before the test is not the test's. A test that
failed anyway gets the leaks as a section of its report: its traceback keeps its variables alive, so they may be none.

A test that leaves something behind on purpose says so, with the reason, and is not checked:

```python
@pytest.mark.leaks_allowed(reason="starts a server for the whole session")
def test_server(): ...
```

Options, in ``pytest.ini`` or ``[tool.pytest.ini_options]``:

- ``leaks_deadline``: seconds that things may take to vanish; 2 by default.
- ``leaks_ignore``: regular expressions, one a line; a leak is left out when one of them is found in its text, as the
  report shows it. For what a library keeps and this list does not know: ``^descriptor: .* -> /usr/share/fonts/``

What is started once per process and stays on purpose is never reported (`torchcrew.testing.permanent` has the reasons):

- ``resource_tracker``, ``resource_sharer``, ``forkserver``, ``multiprocessing_heap``: multiprocessing's own services
- ``guardian``, ``zygote``, ``stacks``: torchcrew's
- ``pool_threads``, ``openmp_environment``: thread pools of OpenMP, BLAS and torch, and the variables ``KMP_*``
- ``sigchld``: torch's handler, which reports killed workers
- ``matplotlib_fonts``: the files of matplotlib's own fonts
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any

import pytest

from torchcrew.testing import leaks

__all__ = ("pytest_addoption", "pytest_configure", "pytest_runtest_makereport")

_FAILED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the ini options."""
    parser.addini("leaks_deadline", "seconds that things may take to vanish after a test", default=str(leaks.DEADLINE))
    parser.addini("leaks_ignore", "regular expressions; a leak whose text has one is left out", type="linelist")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, and refuse options that make no sense before any test runs."""
    config.addinivalue_line("markers", "leaks_allowed(reason): do not check what this test leaves behind")
    _deadline(config)
    _ignored(config)


def _deadline(config: pytest.Config) -> float:
    value = config.getini("leaks_deadline")
    try:
        return float(value)
    except ValueError:
        raise pytest.UsageError(f"leaks_deadline should be a number of seconds, but got {value!r}") from None


def _ignored(config: pytest.Config) -> list[str]:
    patterns: list[str] = config.getini("leaks_ignore")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise pytest.UsageError(
                f"leaks_ignore should have regular expressions, but got {pattern!r}: {error}"
            ) from None
    return patterns


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    """Remember whether the test ended by an exception, an expected one too: its traceback keeps variables alive."""
    yield
    if call.excinfo is not None and call.when != "teardown":
        item.stash[_FAILED] = True


@pytest.fixture(autouse=True)
def _no_leaks(request: pytest.FixtureRequest) -> Generator[None, None, None]:
    """Compare what is there after the test with what was there before it."""
    node: pytest.Item = request.node
    marker = node.get_closest_marker("leaks_allowed")
    if marker is not None:
        if not marker.kwargs.get("reason"):
            pytest.fail("the marker leaks_allowed needs a reason: leaks_allowed(reason=...)", pytrace=False)
        yield
        return
    node.stash[_FAILED] = False  # plugins that run a failed test again use the same item
    before = leaks.snapshot()
    yield
    failed = node.stash.get(_FAILED, False)
    found = leaks.settle(before, 0.0 if failed else _deadline(node.config), ignore=_ignored(node.config))
    if found and failed:
        node.add_report_section("teardown", "leaks", leaks.describe(found))
    elif found:
        pytest.fail(f"{node.nodeid} left something behind, {leaks.describe(found)}", pytrace=False)
