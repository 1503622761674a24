"""`channel.claims`: numbers that are given once, presences that end with a process and its children."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from torchcrew.channel import claims as claims_module
from torchcrew.channel.claims import ClaimedArena, Claims
from torchcrew.errors import ArenaFull
from torchcrew.memory.arena import SLOTS


class Child:
    """A forked child that runs something, says so, and waits until it is killed."""

    def __init__(self, work: Callable[[], Any]) -> None:
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.write(write, str(work()).encode() + b"\n")
                signal.pause()
            finally:
                os._exit(1)
        os.close(write)
        self.said = os.read(read, 100).decode().strip()
        os.close(read)

    def kill(self) -> None:
        """Kill and reap."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def test_numbers_are_given_once() -> None:
    """To processes in turn, also when earlier ones are gone."""
    claims = Claims()
    assert claims.register().number == 1
    assert claims.register().number == 1
    for number in (2, 3):
        child = Child(lambda: claims.register().number)
        assert child.said == str(number)
        assert claims.is_alive(number)
        child.kill()
        assert not claims.is_alive(number)
    assert claims.is_alive(1)
    assert not claims.is_alive(4)


def test_a_forked_child_counts_for_its_parent() -> None:
    """It may see what its parent received; and it has a number of its own."""
    claims = Claims()

    def work() -> str:
        mine = claims.register().number
        pid = os.fork()
        if pid == 0:
            signal.pause()
        return f"{mine} {pid}"

    child = Child(work)
    number, grandchild = map(int, child.said.split())
    child.kill()
    assert claims.is_alive(number)
    other = Child(lambda: claims.register().number)
    assert int(other.said) == number + 1
    other.kill()
    os.kill(grandchild, signal.SIGKILL)
    for _ in range(1000):
        if not claims.is_alive(number):
            break
        os.sched_yield()
        threading.Event().wait(0.005)
    assert not claims.is_alive(number)


def test_a_child_that_is_forked_while_another_thread_registers() -> None:
    """It does not keep that thread's lock."""
    claims = Claims()
    presence = claims_module.Presence(claims._control)
    assert presence.try_lock(claims_module._REGISTERING)
    child = Child(lambda: "forked")
    presence.close()
    assert claims.register().number == 1
    child.kill()


def test_receiving() -> None:
    """Seen while it lasts, of all threads, and not of those that died in it."""
    claims = Claims()
    assert not claims.anybody_receives()
    claims.begin_receiving()
    claims.begin_receiving()
    claims.end_receiving()
    assert claims.anybody_receives()
    claims.end_receiving()
    assert not claims.anybody_receives()
    child = Child(claims.begin_receiving)
    assert claims.anybody_receives()
    child.kill()
    assert not claims.anybody_receives()
    claims.begin_waiting()
    assert claims.waits(1)
    claims.end_waiting()
    assert not claims.waits(1)


def test_what_is_committed() -> None:
    """By the living."""
    claims = Claims()
    assert claims.committed() == (0, 0)
    claims.commit(100)
    child = Child(lambda: claims.commit(50))
    assert claims.committed() == (150, 2)
    child.kill()
    assert claims.committed() == (100, 1)
    claims.commit(0)
    assert claims.committed() == (0, 0)


def test_too_many_participants(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error, after a million processes."""
    claims = Claims()
    monkeypatch.setattr(claims_module, "PARTICIPANTS", 2)
    claims.register()

    def work() -> str:
        with pytest.raises(RuntimeError, match="more than 2"):
            claims.register()
        return "refused"

    child = Child(work)
    assert child.said == "refused"
    child.kill()


def test_the_claims_of_an_arena() -> None:
    """Seen by whoever opens it, and not among its blocks."""
    arena = ClaimedArena.create()
    other = ClaimedArena(os.dup(arena.mapping.fd))
    arena.claims[0] = 7
    arena.claims[SLOTS - 1] = 8
    assert (other.claims[0], other.claims[1], other.claims[SLOTS - 1]) == (7, 0, 8)
    assert len(other.claims) == SLOTS
    assert os.fstat(other.mapping.fd).st_size == other.size + 4 * SLOTS
    arena.close()
    other.close()


def test_an_arena_under_a_small_file_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that names the limit."""
    monkeypatch.setattr(claims_module, "file_size_limit", lambda: 1 << 20)
    with pytest.raises(ArenaFull, match="ulimit -f"):
        ClaimedArena.create()
