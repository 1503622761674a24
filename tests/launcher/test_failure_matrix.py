"""Whatever fails, whatever the others do: everything is dead within two seconds, and the error is the first cause.

One of each cell; `test_failure_faults.py` has many, at random instants.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.launcher import failure_cases as cases
from tests.launcher import failure_cells as cells

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("_no_stack_dumps")]


def table(peers: Iterable[str]) -> pytest.MarkDecorator:
    """Every failure beside every peer; by default each peer with the first failure, and the first with each."""
    names = list(peers)
    hows = list(cases.FAILURES)
    return pytest.mark.parametrize(
        ("how", "peer"),
        [
            pytest.param(how, peer, marks=() if peer == names[0] or how == hows[0] else pytest.mark.faults)
            for peer in names
            for how in hows
        ],
    )


@table(cases.FAST_PEERS)
def test_a_rank_fails(how: str, peer: str, tmp_path: Path) -> None:
    """Peers blocked in whatever way end with it, with all their children."""
    cells.rank_fails(tmp_path, peer, how)


@table(["collective", "recv"])
def test_a_rank_of_gloo_fails(how: str, peer: str, tmp_path: Path) -> None:
    """The same in sockets, of which those that are left tell the peers."""
    cells.rank_fails(tmp_path, peer, how, backend="gloo")


@pytest.mark.parametrize("how", ["raises", pytest.param("SIGKILL", marks=pytest.mark.faults)])
def test_a_rank_fails_while_a_peer_has_a_zygote_of_its_own(how: str, tmp_path: Path) -> None:
    """The peer's zygote, guardian and workers end, too."""
    cells.rank_fails(tmp_path, "zygote loader", how)


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.faults)])
def test_the_launcher_dies(signum: int, tmp_path: Path) -> None:
    """A job with peers of each kind at the time: nothing below the launcher lives on."""
    dead = cells.launcher_dies(tmp_path / "jobs", cases.FAST_PEERS, signum)
    assert set(dead) == set(cases.FAST_PEERS)


def test_the_launcher_is_interrupted(tmp_path: Path) -> None:
    """With peers of each kind: KeyboardInterrupt, once; uncaught, it ends the launcher as it ends any program."""
    measured = cells.launcher_is_interrupted(tmp_path / "jobs", cases.FAST_PEERS)
    assert set(measured) == set(cases.FAST_PEERS)


def test_the_zygote_dies(tmp_path: Path) -> None:
    """The jobs go on, with peers of each kind; a failure after that is treated as any other."""
    measured = cells.zygote_dies(tmp_path / "jobs", cases.FAST_PEERS)
    assert set(measured) == set(cases.FAST_PEERS)


@table(["collective", "GIL", "loader"])
def test_a_forked_rank_fails(how: str, peer: str, tmp_path: Path) -> None:
    """The same for ranks that are forks of this process."""
    cells.rank_fails(tmp_path, peer, how, start_method="fork")


_slow = pytest.mark.faults


@pytest.mark.parametrize(
    ("method", "how", "peer"),
    [
        ("spawn", "raises", "collective"),
        pytest.param("forkserver", "SIGKILL", "subprocess", marks=_slow),
        *(
            pytest.param(method, how, peer, marks=_slow)
            for method in ("spawn", "forkserver")
            for how in cases.FAILURES
            for peer in ("recv", "GIL", "loader")
        ),
    ],
)
def test_a_rank_of_another_start_method_fails(method: Any, how: str, peer: str, tmp_path: Path) -> None:
    """The same for ranks that are started as multiprocessing does."""
    cells.rank_fails(tmp_path, peer, how, start_method=method)


@pytest.mark.parametrize("method", ["fork", *(pytest.param(name, marks=_slow) for name in ("spawn", "forkserver"))])
def test_the_launcher_of_another_start_method_dies(method: str, tmp_path: Path) -> None:
    """Ranks that are children of the launcher, or of the standard library's server."""
    peers = cases.FAST_PEERS if method == "fork" else ("collective", "GIL")
    cells.launcher_dies(tmp_path / "jobs", peers, signal.SIGKILL, method=method)
