"""Messages between ranks of the process group `crew`: values, order, waiting, and what ends a wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.collectives import mail_cases as cases
from tests.collectives import mail_faults as faults
from tests.collectives.ranks import Failed, Ranks, results_of
from torchcrew.crew import zygote


@pytest.fixture(scope="module", autouse=True)
def _zygote_ends() -> Iterator[None]:
    yield
    zygote.stop()


def test_values() -> None:
    """Every size about slots and rings, every type and layout, and objects, arrive as they were sent."""
    results_of(cases.values, 2)


def test_order() -> None:
    """Messages fit receives by tag, in order, whichever of them is there first."""
    results_of(cases.order, 2)


def test_nobody_waits() -> None:
    """A message that was begun goes on while both programs are in a collective, or compute; then the thread ends."""
    results_of(cases.nobody_waits, 2)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_ring(size: int) -> None:
    """Batches of sends and receives in a ring, and from all to all beside a collective, do not wait for ever."""
    results_of(cases.ring, size)


@pytest.mark.parametrize("size", [2, 4])
def test_anybody(size: int) -> None:
    """A receive from anybody takes each message once, in the order of each sender, and says whose it was."""
    results_of(cases.anybody, size)


def test_callbacks() -> None:
    """What a future calls, in whichever thread, may wait for another message: one to come, or one that never does."""
    results_of(cases.callbacks, 2)


def test_broken() -> None:
    """Who waits for a message when another one breaks the group, of this rank, learns it at once."""
    results_of(cases.broken, 3)


def test_threads() -> None:
    """Many threads that send and receive at once, in any order that ends, get each its own."""
    assert results_of(cases.threads, 3) == [120] * 3


def test_errors() -> None:
    """What is refused leaves the group as it was; two sizes are both named; a forked child has no part."""
    results_of(faults.errors, 2)


def test_timeouts() -> None:
    """A message that does not come in time is a `CollectiveTimeout` that shows where the other rank is."""
    ours, theirs = results_of(faults.timeouts, 2)
    assert ours == "broken"
    assert theirs.startswith("PeerDied: rank 0 (pid ")
    assert "in the middle of a message" in theirs


def test_death_in_the_middle() -> None:
    """A rank that is killed while it sends is named to those who wait for it; the others' messages go on."""
    with Ranks(faults.is_killed, 3) as ranks:
        ranks.results()
        at = ranks.signal(1)
        for found in ranks.results(0, 2):
            assert not isinstance(found, Failed), found.traceback
            when, text = found.split(" ", 1)
            assert float(when) - at < 1
            assert text.startswith(f"rank 1 (pid {ranks.pids[1]}) has ended")


def test_leaving() -> None:
    """A rank that destroys its group finishes what it sends; what it has sent is received; then waiting ends."""
    texts, _, _ = results_of(faults.leaves, 3)
    assert len(texts) == 2
    assert "has destroyed its process group" in texts[0]
    assert texts[1].startswith("nobody is left who could send")


def test_idle() -> None:
    """Who waits for a message sleeps."""
    used, _ = results_of(faults.idle, 2)
    assert used < 0.06, "of 3 s, of which the scheduler needs up to half where many processes run"


def test_nothing_is_left() -> None:
    """Groups that were destroyed leave no thread, descriptor or mapping, whatever was pending in them."""
    for maps, _, _ in results_of(faults.lets_go, 2):
        assert maps == 1, "the group that is still there"
