"""Ranks that die, stop, leave, are interrupted or fork: the others are told who, at once, and get no wrong result."""

from __future__ import annotations

import random
import secrets
import signal
import time
from collections.abc import Iterator

import pytest

from tests.collectives import death_cases as cases
from tests.collectives.ranks import Failed, Ranks
from torchcrew.crew import zygote

#: Seconds within which survivors know, on a machine that does other things, too.
AT_ONCE = 1.0


@pytest.fixture(scope="module", autouse=True)
def _zygote_ends() -> Iterator[None]:
    yield
    zygote.stop()


def kill_one(seed: int) -> None:
    """Kill a rank at a random instant of a stream of collectives."""
    draw = random.Random(seed)
    size = draw.choice((2, 2, 3, 4))
    victim = draw.randrange(size)
    with Ranks(cases.stream, size, seed) as ranks:
        assert ranks.results() == ["ready"] * size
        time.sleep(draw.random() * 0.05)
        killed = ranks.signal(victim)
        survivors = [rank for rank in range(size) if rank != victim]
        for rank, result in zip(survivors, ranks.results(*survivors), strict=True):
            assert isinstance(result, Failed), f"seed={seed}, rank {rank}: {result}"
            # Who learns it from another survivor, says so.
            assert result.kind == "PeerDied", f"seed={seed}, rank {rank}: {result.traceback}"
            assert f"rank {victim} (pid {ranks.pids[victim]})" in result.text, f"seed={seed}, rank {rank}: {result}"
            assert result.at - killed < AT_ONCE, f"seed={seed}: rank {rank} knew after {result.at - killed:.2f} s"


def test_a_killed_rank() -> None:
    """Survivors raise PeerDied with its rank and pid, within a second; what they had before was right."""
    for _ in range(8):
        kill_one(secrets.randbits(32))


@pytest.mark.faults
def test_killed_ranks() -> None:
    """Hundreds of them."""
    for _ in range(400):
        kill_one(secrets.randbits(32))


def test_a_stopped_rank() -> None:
    """CollectiveTimeout, with its rank and pid; a stopped process cannot say where it is."""
    with Ranks(cases.late, 3, "stops", 1.0, timeout=1.0) as ranks:
        assert ranks.results(1) == ["ready"]
        ranks.signal(1, signal.SIGSTOP)
        kind, text, again, seconds = _second(ranks, 0)
        assert kind == "CollectiveTimeout", text
        assert f"rank 1 (pid {ranks.pids[1]})" in text
        assert "cannot be used any more" in again
        assert seconds < 4.0


def _second(ranks: Ranks, rank: int) -> tuple[str, str, str, float]:
    """What a rank of `late` tells behind its "ready"."""
    assert ranks.results(rank) == ["ready"]
    found = ranks.results(rank)[0]
    assert not isinstance(found, Failed), found.traceback
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("what", ["sleeps", "async"])
def test_a_rank_that_does_not_come(what: str) -> None:
    """CollectiveTimeout shows its Python stack, also where the call was asynchronous."""
    with Ranks(cases.late, 3, what, 1.0, timeout=1.0) as ranks:
        for rank in (0, 2):
            kind, text, again, seconds = _second(ranks, rank)
            assert kind in ("CollectiveTimeout", "PeerDied"), text  # PeerDied: of the one that gave up first
            assert f"rank 1 (pid {ranks.pids[1]})" in text
            if kind == "CollectiveTimeout":
                assert "death_cases.py" in text
                assert "in somewhere_else" in text
            assert "cannot be used any more" in again
            assert f"rank 1 (pid {ranks.pids[1]})" in again
            assert 0.5 < seconds < 5.0


@pytest.mark.parametrize(
    ("what", "expected"), [("destroys", "has destroyed its process group"), ("exits", "has ended")]
)
def test_a_rank_that_goes(what: str, expected: str) -> None:
    """PeerDied at once, with the reason."""
    with Ranks(cases.late, 3, what, 1.0) as ranks:
        for rank in (0, 2):
            kind, text, again, seconds = _second(ranks, rank)
            assert kind == "PeerDied"
            assert f"rank 1 (pid {ranks.pids[1]})" in text
            assert expected in text
            assert expected in again
            assert seconds < AT_ONCE


def test_an_interrupt() -> None:
    """Ctrl-C ends a wait; the others are told that this rank failed, and why."""
    with Ranks(cases.interrupted, 2) as ranks:
        assert ranks.results(0) == ["interrupted"]
        ranks.say(1)
        text, other = ranks.results(0, 1)
        assert "cannot be used any more: KeyboardInterrupt" in text
        assert other.startswith(f"PeerDied: rank 0 (pid {ranks.pids[0]}) failed in a collective of this group: Keyb")


def test_a_forked_child() -> None:
    """Is refused, and can do the group no harm."""
    with Ranks(cases.forked, 2) as ranks:
        text, other = ranks.results()
        assert not isinstance(text, Failed), text.traceback
        assert not isinstance(other, Failed), other.traceback
        lines = text.splitlines()
        assert len(lines) == 2
        for line in lines:
            assert line.startswith(f"RuntimeError: this process group belongs to process {ranks.pids[0]}"), line


def test_a_timeout_of_the_group() -> None:
    """`new_group(timeout=...)` is what its collectives wait."""
    with Ranks(cases.own_timeout, 2) as ranks:
        kind, text = ranks.results(0)[0]
        assert kind == "CollectiveTimeout"
        assert "rank 1" in text


def test_an_aborted_group() -> None:
    """What waits in it is told, and no thread stays."""
    with Ranks(cases.destroyed_while_waiting, 2) as ranks:
        seconds, text, left = ranks.results(0)[0]
        assert seconds < AT_ONCE
        assert "nothing" not in text
        assert left == []
