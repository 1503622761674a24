"""Windows over one memfd: mapped once, kept by views, gone with the last one."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchcrew.memory import libc
from torchcrew.memory.mapping import WINDOW, Mapping, round_block

NAME = "torchcrew-test-mapping"


def mapped() -> int:
    """How many areas of the test's memfd this process has mapped."""
    return Path("/proc/self/maps").read_text().count(NAME)


@contextlib.contextmanager
def mapping(nbytes: int = 1 << 40) -> Iterator[Mapping]:
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    made = Mapping(fd)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 65536, 65537, 10**6, 2**20, 2**20 + 1, 10**9, 2**40 - 1])
def test_block_sizes(nbytes: int) -> None:
    """Whole pages, at least one, at most an eighth (and a page) more than asked, and stable when rounded again."""
    size = round_block(nbytes)
    assert size % libc.PAGE == 0
    assert nbytes <= size <= max(libc.PAGE, nbytes * 9 / 8 + libc.PAGE)
    assert size >= libc.PAGE
    assert round_block(size) == size


def test_there_are_few_block_sizes() -> None:
    """ctypes keeps a type for each for ever."""
    assert len({round_block(n) for n in range(0, 64 << 20, 4096)}) < 120


def test_views_of_one_window_share_its_mapping() -> None:
    """One `mmap`, however many views."""
    with mapping() as made:
        views = [made.view(i * 4096, 4096) for i in range(100)]
        assert mapped() == 1
        views[3][0] = b"x"
        assert os.pread(made.fd, 1, 3 * 4096) == b"x"
        del views


def test_a_view_across_a_border() -> None:
    """Reads and writes are those of the two windows."""
    with mapping() as made:
        left, right = made.view(WINDOW - 4096, 4096), made.view(WINDOW, 4096)
        both = made.view(WINDOW - 4096, 8192)
        both[4095], both[4096] = b"a", b"b"
        assert (left[4095], right[0]) == (b"a", b"b")
        large = made.view(WINDOW // 2, 3 * WINDOW)
        assert len(large) == 3 * WINDOW
        assert large[WINDOW // 2] == b"b"
        del left, right, both, large


def test_far_offsets() -> None:
    """The last page of a terabyte costs a window."""
    with mapping() as made:
        view = made.view((1 << 40) - 4096, 4096)
        view[4095] = b"z"
        assert os.pread(made.fd, 1, (1 << 40) - 1) == b"z"
        del view


def test_views_survive_closing() -> None:
    """Memory is unmapped when the last view of a window goes, not before."""
    with mapping() as made:
        first, second = made.view(0, 4096), made.view(2 * WINDOW, 4096)
        inner = memoryview(first).cast("B")[10:20]
    first[10] = b"q"
    assert mapped() == 2
    del second
    assert mapped() == 1
    del first
    assert inner[0] == ord("q")
    del inner
    assert mapped() == 0


def test_closing_twice() -> None:
    """Does not close somebody else's descriptor."""
    with mapping() as made:
        made.close()
        other = os.memfd_create("other", os.MFD_CLOEXEC)
        made.close()
        os.fstat(other)
        os.close(other)


def test_no_view_after_closing() -> None:
    """An error, not somebody else's memory."""
    with mapping() as made:
        made.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            made.view(0, 4096)


def test_views_in_a_forked_child() -> None:
    """Parent and child see one memory; the child's end unmaps nothing in the parent."""
    with mapping() as made:
        view = made.view(0, 4096)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                view[0] = b"c"
                made.view(4096, 4096)[0] = b"d"
                del view
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert view[0] == b"c"
        assert made.view(4096, 1)[0] == b"d"
        del view


def test_windows_are_there_for_finalizers_of_a_cycle() -> None:
    """Who dies in a reference cycle together with the mapping may still write."""
    done: list[bytes] = []

    class Owner:
        def __init__(self, made: Mapping) -> None:
            self.mapping = made
            self.me = self

        def __del__(self) -> None:
            view = self.mapping.view(0, 10)
            view[0] = b"k"
            done.append(view[0])
            self.mapping.close()

    fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
    os.ftruncate(fd, 4096)
    owner = Owner(Mapping(fd))
    owner.mapping.view(0, 10)
    del owner
    gc.collect()
    assert done == [b"k"]
    assert mapped() == 0


def test_the_address_is_where_the_bytes_are() -> None:
    """`ctypes.addressof` of a view is what the writer copies to."""
    with mapping() as made:
        view = made.view(8192, 4096)
        ctypes.memmove(ctypes.addressof(view), b"abc", 3)
        assert os.pread(made.fd, 3, 8192) == b"abc"
        del view
