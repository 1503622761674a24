"""What ranks do that nobody expects of them: each of these once had a wrong answer."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchcrew
from torchcrew.errors import CollectiveMismatch, RankDied, RanksStuck
from torchcrew.launcher import hang
from torchcrew.launcher.ledger import CALLS_KEPT, Call, Ledger, Phase
from torchcrew.launcher.watch import Progress

pytestmark = pytest.mark.timeout(60)


def _fork_that_returns() -> str:
    return "fork" if os.fork() == 0 else _after_fork()


def _fork_that_raises() -> str:
    if os.fork() == 0:
        raise ValueError("of the fork")
    return _after_fork()


def _fork_that_exits() -> str:
    if os.fork() == 0:
        sys.exit(0)
    return _after_fork()


def _after_fork() -> str:
    """The rank's own value, once the fork has come to its end."""
    pid, status = os.wait()
    assert pid > 0
    dist.barrier()
    return f"rank {torchcrew.rank()}, {os.waitstatus_to_exitcode(status)}"


@pytest.mark.parametrize(
    ("function", "code"), [(_fork_that_returns, 0), (_fork_that_raises, 1), (_fork_that_exits, 0)], ids=str
)
def test_a_fork_that_comes_out_of_the_function_speaks_for_no_rank(
    function: Any, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert torchcrew.launch(function, nprocs=2) == [f"rank 0, {code}", f"rank 1, {code}"]
    assert capfd.readouterr().err.count("ValueError: of the fork") == 2 * code


def _leave_with(code: Any) -> None:
    sys.exit(code)


@pytest.mark.parametrize("code", [torch.zeros(2), [0], 0.0], ids=str)
def test_a_rank_that_exits_with_no_number_ends_as_any_program_does(code: Any) -> None:
    with pytest.raises(RankDied) as caught:
        torchcrew.launch(_leave_with, code, nprocs=1)
    assert caught.value.exitcode == 1


def _broadcast_lists_of_different_lengths() -> None:
    time.sleep(0.1 * torchcrew.rank())
    dist.broadcast_object_list([1] * (1 + torchcrew.rank()), src=0)


def test_lists_of_different_lengths_that_are_broadcast_are_named() -> None:
    with pytest.raises(CollectiveMismatch, match=r"objects=2.*objects=1"):
        torchcrew.launch(_broadcast_lists_of_different_lengths, nprocs=2)


def _progress(made: bool) -> Progress:
    """Of ranks that make some, if they do, while they are asked."""
    count = [0]

    def explain() -> str:
        count[0] += made
        return "rank 0 sleeps"

    return Progress(1e-9, lambda: (count[0],), lambda: False, explain)


def test_ranks_that_go_on_while_they_are_asked_are_not_stuck() -> None:
    going, stuck = _progress(True), _progress(False)
    for _ in range(5):
        going.look()
        time.sleep(0.001)
    stuck.look()
    time.sleep(0.001)
    with pytest.raises(RanksStuck, match="rank 0 sleeps"):
        stuck.look()


def _ledger_of_one_ahead_elsewhere(calls: int) -> Ledger:
    """Rank 0 waits in the first collective of all; rank 1 was in it, and in so many of another group since."""
    ledger = Ledger.create(2)
    for rank in range(2):
        ledger.enter(rank, Phase.RUNNING)
        ledger.begin(rank, Call("barrier", sequence=1, generation=1))
        ledger.end(rank)
    for number in range(calls):
        ledger.begin(1, Call("barrier", "1", sequence=number + 1, generation=1))
        ledger.end(1)
    ledger.begin(0, Call("barrier", sequence=2, generation=1))
    return ledger


@pytest.mark.parametrize(("calls", "words"), [(1, "last was in #1"), (CALLS_KEPT, "was in none of late")])
def test_of_calls_that_are_forgotten_nothing_is_said(calls: int, words: str) -> None:
    ledger = _ledger_of_one_ahead_elsewhere(calls)
    text = hang.explain([hang.Member(rank, os.getpid()) for rank in range(2)], ledger)
    ledger.close()
    assert f"missing from barrier #2: rank 1 ({words})" in text
