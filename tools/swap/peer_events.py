"""A pytest plugin that appends one JSON line to the file PEER_EVENTS for each test that starts or ends."""

from __future__ import annotations

import json
import os

import pytest


def _write(**event: object) -> None:
    with open(os.environ["PEER_EVENTS"], "a") as file:
        file.write(json.dumps(event) + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Say which tests there are."""
    _write(event="collected", ids=[item.nodeid for item in session.items])


def pytest_runtest_logstart(nodeid: str) -> None:
    """Say which test runs now."""
    _write(event="start", id=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say how a test went, and its setup and teardown where these failed or skipped."""
    if report.when == "call" or report.outcome != "passed":
        reason = report.longrepr
        reason = reason[2] if isinstance(reason, tuple) else str(reason or "")
        outcome = "error" if report.when != "call" and report.failed else report.outcome
        _write(event="report", id=report.nodeid, outcome=outcome, seconds=report.duration, reason=reason)


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Say that a test is over."""
    _write(event="finish", id=nodeid)
