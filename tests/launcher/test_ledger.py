"""The ledger: what is written is read, from this process and others; a killed writer leaves whole records."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from torchcrew.launcher.ledger import CALLS_KEPT, MOST_RANKS, Call, Entry, Ledger, Phase
from torchcrew.memory.arena import make_memfd

CALL = Call("all_reduce", "", 1, (10,), "float32", "SUM", "train.py:40")


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    ledger = Ledger.create(3)
    yield ledger
    ledger.close()


def call(sequence: int, group: str = "", **more: Any) -> Call:
    return Call("all_reduce", group, sequence, (sequence,), "float32", "SUM", f"train.py:{sequence}", **more)


def test_nothing_is_written_yet(ledger: Ledger) -> None:
    """A rank of which nobody has heard is starting."""
    assert ledger.entry(2) == Entry(Phase.STARTING, None, 0, 0, 0)
    assert ledger.find(2, "", 1) is None
    assert ledger.latest(2, "") == 0
    assert ledger.members() == []


def test_phases_calls_and_steps(ledger: Ledger) -> None:
    """Each kind of progress shows in the entry, and is a tick."""
    ledger.enter(1, Phase.RUNNING)
    ledger.step(1)
    ledger.begin(1, CALL)
    assert ledger.entry(1) == Entry(Phase.RUNNING, CALL, 1, 1, 3)
    ledger.end(1)
    ledger.enter(1, Phase.RETURNED)
    assert ledger.entry(1) == Entry(Phase.RETURNED, None, 1, 1, 5)
    assert ledger.entry(0) == Entry(Phase.STARTING, None, 0, 0, 0)


@pytest.mark.parametrize(
    "call",
    [
        Call("barrier"),
        Call("send", "7", 0, (), "bool", "dst=3", "a.py:1"),
        Call("all_gather_into_tensor", "x" * 40, 2**40, (2, 3, 4), "float8_e4m3fnuz", "SUM, dst=0", "übung.py:7", 3),
        Call("broadcast", "", 1, (0, 5), "float4_e2m1fn_x2"),
    ],
)
def test_a_call_comes_back_as_it_was(ledger: Ledger, call: Call) -> None:
    """Fields that are empty, scalars, and the longest names there are."""
    ledger.begin(0, call)
    assert ledger.entry(0).call == call


def test_long_texts_are_shortened(ledger: Ledger) -> None:
    """A site keeps its line, a shape its number of elements; a character is not cut in two."""
    ledger.begin(0, Call("n" * 30, "ü" * 30, 1, (10,) * 20, "d" * 20, "ß" * 40, "f" * 99 + ".py:40"))
    found = ledger.entry(0).call
    assert found is not None
    assert found.name == "n" * 24
    assert found.group == "ü" * 24
    assert found.shape == (10**20,)
    assert found.detail == "ß" * 24
    assert found.site.endswith("f.py:40")
    assert len(found.site) == 48
    assert ledger.find(0, "ü" * 30, 1) == found
    assert ledger.latest(0, "ü" * 30) == 1


def test_the_last_calls_are_found_by_group_and_number(ledger: Ledger) -> None:
    """The ring has the last 64 of all groups together."""
    for number in range(1, 101):
        ledger.begin(0, call(number))
        ledger.begin(0, call(number, "7"))
    half = CALLS_KEPT // 2
    assert ledger.find(0, "", 100) == call(100)
    assert ledger.find(0, "7", 100 - half + 1) == call(100 - half + 1, "7")
    assert ledger.find(0, "7", 100 - half) is None
    assert ledger.find(0, "8", 100) is None
    assert ledger.find(1, "", 100) is None
    assert ledger.latest(0, "") == ledger.latest(0, "7") == 100
    assert ledger.latest(0, "8") == 0


def test_numbers_of_another_generation_are_others(ledger: Ledger) -> None:
    """After the default group was made anew, what is asked for is of the new one unless the old one is named."""
    ledger.begin(0, call(1))
    ledger.begin(0, call(2))
    ledger.begin(0, call(1, generation=2))
    assert ledger.find(0, "", 1) == call(1, generation=2)
    assert ledger.find(0, "", 1, 1) == call(1)
    assert ledger.latest(0, "") == 1
    assert ledger.latest(0, "", 1) == 2


def test_uncounted_calls_are_seen_but_not_found(ledger: Ledger) -> None:
    """`send` and `recv` have no number."""
    ledger.begin(0, call(1))
    ledger.begin(0, Call("send", "", 0, (1,), "float32", "dst=1"))
    entry = ledger.entry(0)
    assert entry.call is not None
    assert entry.call.name == "send"
    assert ledger.find(0, "", 0) is None
    assert ledger.latest(0, "") == 1


def test_one_of_two_calls_ends(ledger: Ledger) -> None:
    """Two threads are in a call; what the one that ended leaves is the other's."""
    first = ledger.begin(0, call(1, "a"))
    ledger.begin(0, call(1, "b"))
    ledger.end(0, first)
    assert ledger.entry(0).call == call(1, "a")


def test_a_withdrawn_call_is_not_found(ledger: Ledger) -> None:
    """Its number is given again."""
    begun = ledger.begin(0, call(1))
    ledger.withdraw(0, begun)
    assert ledger.find(0, "", 1) is None
    ledger.begin(0, Call("barrier", "", 1))
    ledger.withdraw(0, begun)  # it is another one's place by now
    assert ledger.find(0, "", 1) == Call("barrier", "", 1)


def test_a_new_process_clears_what_the_one_before_called(ledger: Ledger) -> None:
    """Its calls would be taken for its own, which begin at 1 again; the counters go on."""
    ledger.begin(0, call(1))
    ledger.clear(0)
    assert ledger.find(0, "", 1) is None
    assert ledger.latest(0, "") == 0
    assert ledger.entry(0) == Entry(Phase.STARTING, None, 1, 0, 2)


def test_unlike_names_the_peers_that_differ(ledger: Ledger) -> None:
    """Equal ones, absent ones and those of other places of the program are not mentioned."""
    begun = ledger.begin(0, CALL)
    assert ledger.unlike(begun, [1, 2]) == []
    ledger.begin(1, Call(*(*list(vars(CALL).values())[:6], "other.py:1")))
    ledger.begin(2, Call("barrier", "", 1))
    assert ledger.unlike(begun, [1, 2]) == [(2, CALL, Call("barrier", "", 1))]


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_that_is_none(ledger: Ledger, rank: int) -> None:
    """It does not write into another one's part."""
    for method in (
        ledger.entry,
        ledger.step,
        lambda rank: ledger.begin(rank, CALL),
        lambda rank: ledger.set_pid(rank, 1),
    ):
        with pytest.raises(IndexError):
            method(rank)


@pytest.mark.parametrize("count", [0, -1, MOST_RANKS + 1])
def test_impossible_counts(count: int) -> None:
    """The head has room for so many pids."""
    with pytest.raises(ValueError, match="room"):
        Ledger.create(count)


def test_closing_twice() -> None:
    """Nothing can be done with it any more, and that is said."""
    ledger = Ledger.create(MOST_RANKS)
    begun = ledger.begin(MOST_RANKS - 1, CALL)
    assert ledger.entry(MOST_RANKS - 1).call == CALL
    ledger.close()
    ledger.close()
    for use in (
        lambda: ledger.entry(0),
        lambda: ledger.step(0),
        lambda: ledger.set_pid(0, 1),
        lambda: ledger.unlike(begun, [0]),
        ledger.members,
    ):
        with pytest.raises(ValueError, match="closed"):
            use()


def write_as(ledger: Ledger, rank: int) -> None:
    ledger.set_pid(rank, os.getpid())
    ledger.enter(rank, Phase.RUNNING)
    ledger.begin(rank, CALL)
    ledger.close()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_another_process_writes(ledger: Ledger, method: str) -> None:
    """It pickles while a process starts; the next process with the rank goes on counting."""
    for calls in (1, 2):
        child = multiprocessing.get_context(method).Process(target=write_as, args=(ledger, 1))
        child.start()
        child.join()
        assert ledger.members() == [(1, child.pid)]
        assert ledger.entry(1) == Entry(Phase.RUNNING, CALL, calls, 0, 2 * calls)
        child.close()


def test_of_process(ledger: Ledger) -> None:
    """Somebody else reads it by descriptor; he cannot write, and closes only what is his."""
    ledger.set_pid(1, 4711)
    ledger.begin(1, CALL)
    for _ in range(2):
        other = Ledger.of_process(os.getpid())
        assert other is not None
        assert other.count == 3
        assert other.members() == [(1, 4711)]
        assert other.entry(1) == ledger.entry(1)
        assert other.find(1, "", 1) == CALL
        assert other.latest(1, "") == 1
        for write in (lambda: other.step(1), lambda: other.set_pid(1, 1), lambda: other.begin(1, CALL)):  # noqa: B023
            with pytest.raises(PermissionError):
                write()
        other.close()
        other.close()


def test_of_a_process_without_one() -> None:
    """None, also for one that does not exist."""
    assert Ledger.of_process(os.getpid()) is None
    assert Ledger.of_process(2**22 + 1) is None


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"tcledger",
        struct.pack("<8sqq", b"tcledgeR", 1, 1),
        struct.pack("<8sqq", b"tcledger", 2, 1),
        struct.pack("<8sqq", b"tcledger", 1, 0),
        struct.pack("<8sqq", b"tcledger", 1, -1),
        struct.pack("<8sqq", b"tcledger", 1, 5),
        struct.pack("<8sqq", b"tcledger", 1, 2**62),
    ],
)
@pytest.mark.parametrize("nbytes", [0, 40960])
def test_of_a_process_with_something_else(head: bytes, nbytes: int) -> None:
    """A file of that name that is no ledger, or one of another version, is not taken for one, nor kept open."""
    fd = make_memfd("torchcrew-ledger", nbytes)
    os.pwrite(fd, head, 0)
    assert Ledger.of_process(os.getpid()) is None
    real = Ledger.create(1)  # behind the wrong one
    found = Ledger.of_process(os.getpid())
    assert found is not None
    found.close()
    real.close()
    os.close(fd)


def test_a_file_that_shrinks() -> None:
    """Reading another process's ledger cannot be made a crash."""
    fd = make_memfd("torchcrew-ledger", 40960)
    os.pwrite(fd, struct.pack("<8sqq", b"tcledger", 1, 1), 0)
    found = Ledger.of_process(os.getpid())
    assert found is not None
    os.ftruncate(fd, 100)
    assert found.entry(0) == Entry(Phase.STARTING, None, 0, 0, 0)
    assert (found.find(0, "", 1), found.latest(0, ""), found.members()) == (None, 0, [])
    found.close()
    os.close(fd)


def scribble(ledger: Ledger, rank: int) -> None:
    """Write until killed; all fields of a call say the same number."""
    number = ledger.latest(rank, "")
    while True:
        number += 1
        ledger.begin(rank, consistent(number))
        ledger.step(rank)
        ledger.end(rank)


def consistent(number: int) -> Call:
    return Call(f"f{number}", "", number, (number, number), f"d{number}", str(number) * 4, f"s:{number}")


def read_while_writers_die(ledger: Ledger, kills: int, seed: int) -> None:
    """Read all the time; every record is one that was written, and nothing goes back."""
    chance = random.Random(seed)
    context = multiprocessing.get_context("fork")
    other = Ledger.of_process(os.getpid())
    assert other is not None
    before = ledger.entry(0)
    for _ in range(kills):
        child = context.Process(target=scribble, args=(ledger, 0))
        child.start()
        assert child.pid is not None
        until = time.monotonic() + 5
        while ledger.entry(0).ticks < before.ticks + 20 and time.monotonic() < until:
            check(ledger)
        end = time.monotonic() + chance.random() * 0.003
        while time.monotonic() < end:
            check(chance.choice([ledger, other]))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        child.close()
        now = check(ledger)
        assert now == check(other) == check(ledger)  # it is dead: there is one answer
        assert now.ticks >= before.ticks + 20
        assert now.calls > before.calls
        before = now
    other.close()


def check(ledger: Ledger) -> Entry:
    entry = ledger.entry(0)
    latest = ledger.latest(0, "")
    found = ledger.find(0, "", latest)
    for call in (entry.call, found):
        if call is not None:
            assert call == consistent(call.sequence)
    assert entry.steps <= entry.calls <= latest + 1
    return entry


def test_killed_writers(ledger: Ledger) -> None:
    """A writer is killed at any instant; readers never wait and never see half a record."""
    read_while_writers_die(ledger, 20, 1)


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_many_killed_writers(ledger: Ledger) -> None:
    """The same, many hundred times."""
    read_while_writers_die(ledger, 800, int(time.time()))


def test_a_writer_stopped_within_a_record(ledger: Ledger) -> None:
    """A record that is half written is none: the state before it stands, and the call is not found."""
    ledger.begin(0, call(1))
    ledger.end(0)
    ledger.begin(0, call(2))
    whole = ledger.entry(0)
    part = ledger._bytes
    assert part is not None
    base = 20480
    for state in (base, base + 64):  # each of the two states in turn
        saved = part[state : state + 44].tobytes()
        part[state + 8] ^= 1
        entry = ledger.entry(0)
        assert entry in (whole, Entry(Phase.STARTING, None, 1, 0, 2))
        part[state : state + 44] = saved
    slot = base + 1024 + 2 * 256
    part[slot + 100] ^= 1
    assert ledger.find(0, "", 2) is None
    assert ledger.find(0, "", 1) == call(1)
    assert ledger.entry(0).call is None
    ledger.begin(0, call(3))
    assert ledger.entry(0).call == call(3)
