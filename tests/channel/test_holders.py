"""Witnesses: who else holds a mailbox, however they got it, and what is known when they are gone."""

from __future__ import annotations

import os
import select
import threading
import time
from multiprocessing import context, get_context
from queue import Empty
from typing import Any

import pytest

from torchcrew.channel.holders import Deserted, Holders


def forked(work: Any = None) -> int:
    """A child that does this, and ends."""
    pid = os.fork()
    if pid == 0:
        try:
            if work is not None:
                work()
        finally:
            os._exit(0)
    return pid


def sleep() -> None:
    time.sleep(30)


def end(pid: int) -> None:
    os.kill(pid, 9)
    os.waitpid(pid, 0)


def test_nobody_at_first() -> None:
    """Then nobody can have gone away, either."""
    holders = Holders()
    assert holders.watched() == []
    assert not holders.deserted()


def test_forked_children() -> None:
    """Those forked after it was made; told by the pid that they wrote."""
    early = forked(sleep)
    holders = Holders()
    pids = [forked(sleep) for _ in range(3)]
    assert len(holders.watched()) == 3
    end(pids[1])
    assert len(holders.watched()) == 2
    assert holders.gone == [pids[1]]
    assert not holders.deserted()
    end(pids[0])
    end(pids[2])
    assert holders.deserted()
    assert sorted(holders.gone) == sorted(pids)
    end(early)


def test_a_forked_child_knows_none_of_them() -> None:
    """Its parent's witnesses are closed there, and its own children are watched."""
    holders = Holders()
    sibling = forked(sleep)
    read, write = os.pipe()

    def look() -> None:
        found: list[Any] = [holders.watched(), holders.deserted()]
        os.waitpid(forked(), 0)
        found += [holders.watched(), holders.deserted()]
        os.write(write, repr(found).encode())

    os.waitpid(forked(look), 0)
    assert os.read(read, 100) == b"[[], False, [], True]"
    end(sibling)
    os.close(read)
    os.close(write)


def test_grandchildren_count() -> None:
    """A holder is gone when all that inherited from it are."""
    holders = Holders()
    read, write = os.pipe()

    def leave_a_child() -> None:
        os.write(write, str(forked(sleep)).encode())

    os.waitpid(forked(leave_a_child), 0)
    grandchild = int(os.read(read, 20))
    assert not holders.deserted()
    os.kill(grandchild, 9)
    assert select.select([*holders.watched()], [], [], 0) is not None
    deadline = time.monotonic() + 10
    while not holders.deserted():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.close(read)
    os.close(write)


def test_many_forks_leave_no_descriptors() -> None:
    """Who is gone is forgotten at the next fork."""
    holders = Holders()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        os.waitpid(forked(), 0)
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert len(holders.gone) >= 19
    del holders
    assert len(os.listdir("/proc/self/fd")) <= before


class Popen:
    """As a starting process sees it: nothing is there yet."""

    pid: int | None = None

    def duplicate_for_child(self, fd: int) -> int:
        return fd

    def DupFd(self, fd: int) -> int:
        return fd


@pytest.fixture
def popen() -> Any:
    starting = Popen()
    context.set_spawning_popen(starting)
    yield starting
    context.set_spawning_popen(None)


def test_a_process_that_is_being_started(popen: Any) -> None:
    """It counts from the beginning; our write end is closed once it has a pid."""
    holders = Holders()
    fd = os.dup(holders.send_along())
    assert not holders.deserted()
    assert holders.watched() == []
    popen.pid = 4711
    assert len(holders.watched()) == 1
    os.close(fd)
    assert holders.watched() == []
    assert holders.gone == [4711]
    assert holders.deserted()


def test_a_start_that_failed(popen: Any) -> None:
    """Our write end does not stay open."""
    holders = Holders()
    before = len(os.listdir("/proc/self/fd"))
    holders.send_along()
    context.set_spawning_popen(None)
    popen_reference = popen
    del popen_reference
    assert len(os.listdir("/proc/self/fd")) == before + 2
    holders.before_fork()
    del holders
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_spawned_process() -> None:
    """In earnest, by the standard library's spawn; it counts until it ends."""
    read, write = os.pipe()
    process = get_context("spawn").Process(target=time.sleep, args=(0,))
    holders = Holders()
    process._args = (Sent(holders),)  # type: ignore[attr-defined]
    process._target = Sent.sleep  # type: ignore[attr-defined]
    process.start()
    assert not holders.deserted()
    assert len(holders.watched()) == 1
    process.join()
    assert holders.deserted()
    assert holders.gone == [process.pid]
    os.close(read)
    os.close(write)


class Sent:
    """Takes what is sent along to where it is received."""

    def __init__(self, holders: Holders) -> None:
        self.holders = holders

    def __getstate__(self) -> Any:
        return self.holders.send_along()

    def __setstate__(self, sent: Any) -> None:
        self.holders = Holders()
        self.holders.received(sent)

    def sleep(self) -> None:
        """The process's work."""


def test_wait() -> None:
    """For what comes, for so long, and not when nobody is left."""
    holders = Holders()
    read, write = os.pipe()

    def attempt() -> Any:
        return os.read(read, 1) if select.select([read], [], [], 0)[0] else None

    with pytest.raises(Empty):
        holders.wait(attempt, read, select.POLLIN, 0.05)
    threading.Timer(0.05, os.write, (write, b"x")).start()
    assert holders.wait(attempt, read, select.POLLIN, None) == b"x"
    pid = forked(lambda: os.write(write, b"y"))
    assert holders.wait(attempt, read, select.POLLIN, None) == b"y"
    os.waitpid(pid, 0)
    with pytest.raises(Deserted):
        holders.wait(attempt, read, select.POLLIN, None)
    with pytest.raises(Empty):
        holders.wait(attempt, read, select.POLLIN, 0.05)
    os.close(read)
    os.close(write)


def test_a_backlog_of_ones_own() -> None:
    """Then nobody is deserted."""
    holders = Holders()
    holders.has_backlog = lambda: True
    os.waitpid(forked(), 0)
    assert not holders.deserted()
    holders.has_backlog = lambda: False
    assert holders.deserted()


def test_news_are_told_once() -> None:
    """And only with others left."""
    holders = Holders()
    told: list[list[int]] = []
    holders.on_gone = told.append
    alive, died = forked(sleep), forked()
    os.waitpid(died, 0)
    read, write = os.pipe()
    for _ in range(2):
        with pytest.raises(Empty):
            holders.wait(lambda: None, read, select.POLLIN, 0.02)
    assert told == [[died]]
    end(alive)
    with pytest.raises(Deserted):
        holders.wait(lambda: None, read, select.POLLIN, None)
    assert told == [[died]]
    os.close(read)
    os.close(write)
