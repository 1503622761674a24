"""Memory of shared tensors that is used again: only when nobody at all has it any more."""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Iterator

import pytest

from torchcrew import memory
from torchcrew.memory import spares

MB = 1 << 20


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    spares.trim()
    yield
    spares.trim()


def inode(fd: int) -> int:
    return os.fstat(fd).st_ino


def is_used_again(nbytes: int, number: int) -> bool:
    """Whether it is among the next memfds."""
    fds = [spares.take("torchcrew-test", nbytes) for _ in range(len(spares._spares) + 1)]
    try:
        return number in map(inode, fds)
    finally:
        for fd in fds:
            os.close(fd)


def test_used_again_when_it_was_closed() -> None:
    """The same memory, with its pages; for sizes that are near enough."""
    fd = spares.take("torchcrew-test", MB)
    number = inode(fd)
    os.close(fd)
    assert is_used_again(MB - 100_000, number)
    assert not is_used_again(2 * MB, number)
    assert not is_used_again(MB // 2 + 1, number)
    assert is_used_again(MB, number)


def test_small_ones_are_not_kept() -> None:
    """Nor those that would take all the room."""
    for nbytes in (1, spares.SMALLEST - 1, 100 * MB):
        fd = spares.take("torchcrew-test", nbytes)
        assert os.fstat(fd).st_size == nbytes
        os.close(fd)
    assert memory.idle_bytes() == 0


def test_a_mapping_keeps_it() -> None:
    """Also when its descriptor is closed."""
    fd = spares.take("torchcrew-test", MB)
    number = inode(fd)
    mapping = mmap.mmap(fd, MB)
    os.close(fd)
    assert not is_used_again(MB, number)
    mapping.close()
    assert is_used_again(MB, number)


def test_a_message_in_flight_keeps_it() -> None:
    """A descriptor in a socket is a use."""
    fd = spares.take("torchcrew-test", MB)
    number = inode(fd)
    one, other = socket.socketpair()
    with one, other:
        socket.send_fds(one, [b"x"], [fd])
        os.close(fd)
        assert not is_used_again(MB, number)
    assert is_used_again(MB, number)


@pytest.mark.parametrize("as_mapping", [False, True])
def test_another_process_keeps_it(as_mapping: bool) -> None:
    """A forked child that inherited it; until it is killed."""
    fd = spares.take("torchcrew-test", MB)
    number = inode(fd)
    mapping = mmap.mmap(fd, MB) if as_mapping else None
    pid = os.fork()
    if pid == 0:
        time.sleep(30)
        os._exit(0)
    if mapping is not None:
        mapping.close()
    os.close(fd)
    assert not is_used_again(MB, number)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    assert is_used_again(MB, number)


def test_a_child_does_not_use_its_parents() -> None:
    """Parent and child would both think that they are alone."""
    fd = spares.take("torchcrew-test", MB)
    number = inode(fd)
    os.close(fd)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = int(is_used_again(MB, number))
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert is_used_again(MB, number)


def test_bounded() -> None:
    """The least recently used is let go of first; `trim` lets go of all."""
    before = len(os.listdir("/proc/self/fd"))
    fds = [spares.take("torchcrew-test", MB) for _ in range(100)]
    for fd in fds:
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) - before <= 32
    for _ in range(10):
        os.close(spares.take("torchcrew-test", 30 * MB))
    assert MB <= memory.idle_bytes() <= 128 * MB
    memory.trim()
    assert memory.idle_bytes() == 0
    assert len(os.listdir("/proc/self/fd")) == before


def test_where_leases_do_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept then."""
    monkeypatch.setattr(spares, "_works", None)
    monkeypatch.setattr(spares, "_is_unused", lambda probe: True)
    fds = [spares.take("torchcrew-test", MB) for _ in range(3)]
    assert len({inode(fd) for fd in fds}) == 3
    assert not spares._spares
    for fd in fds:
        os.close(fd)
