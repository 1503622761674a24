"""The system calls that Python lacks."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchcrew.memory import libc

PAGE = mmap.PAGESIZE


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = os.memfd_create("torchcrew-test", os.MFD_CLOEXEC)
    os.ftruncate(fd, 8 * PAGE)
    yield fd
    os.close(fd)


def test_mapping_is_shared_and_writable(memfd: int) -> None:
    """What is written at one address is read at another mapping and in the file."""
    first, second = libc.map_shared(memfd, 0, 2 * PAGE), libc.map_shared(memfd, PAGE, PAGE)
    ctypes.memmove(first + PAGE, b"hello", 5)
    assert ctypes.string_at(second, 5) == b"hello"
    assert os.pread(memfd, 5, PAGE) == b"hello"
    libc.unmap(first, 2 * PAGE)
    libc.unmap(second, PAGE)
    assert "torchcrew-test" not in Path("/proc/self/maps").read_text()


def test_mapping_stays_out_of_core_dumps(memfd: int) -> None:
    """The kernel's flags say so ("dd")."""
    address = libc.map_shared(memfd, 0, PAGE)
    area = Path("/proc/self/smaps").read_text().partition(f"{address:x}-")[2]
    flags = re.search(r"VmFlags: (.*)", area)
    assert flags is not None
    assert "dd" in flags[1].split()
    libc.unmap(address, PAGE)


def test_a_refused_mapping_says_what_and_why(memfd: int) -> None:
    """More address space than there is."""
    with pytest.raises(OSError, match=r"mapping \d+ bytes of shared memory: Cannot allocate memory"):
        libc.map_shared(memfd, 0, 1 << 50)
    with pytest.raises(OSError, match="Bad file descriptor"):
        libc.map_shared(-1, 0, PAGE)


def test_punching_frees_pages_and_leaves_zeros(memfd: int) -> None:
    """The neighbours and the size of the file stay."""
    os.pwrite(memfd, b"x" * (3 * PAGE), 0)
    before = os.fstat(memfd).st_blocks
    libc.punch(memfd, PAGE, PAGE)
    assert os.fstat(memfd).st_blocks == before - PAGE // 512
    assert os.pread(memfd, 3 * PAGE, 0) == b"x" * PAGE + bytes(PAGE) + b"x" * PAGE
    assert os.fstat(memfd).st_size == 8 * PAGE


def test_a_refused_punch_is_an_error() -> None:
    """A pipe has no pages."""
    read, write = os.pipe()
    with pytest.raises(OSError, match="fallocate"):
        libc.punch(write, 0, PAGE)
    os.close(read)
    os.close(write)


def test_the_death_signal_comes_when_the_parent_ends() -> None:
    """The kernel kills the child of a killed parent."""
    code = """if True:
        import os, signal, time
        from torchcrew.memory import libc
        pid = os.fork()
        if pid == 0:
            libc.set_death_signal(signal.SIGKILL)
            os.write(1, b"%d " % os.getpid())
            time.sleep(30)
        time.sleep(30)
    """
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(os.read(parent.stdout.fileno(), 100))
        parent.send_signal(signal.SIGKILL)
    end = time.monotonic() + 5
    while time.monotonic() < end and Path(f"/proc/{child}/cmdline").exists():
        if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
            break
        time.sleep(0.01)
    else:
        assert not Path(f"/proc/{child}/cmdline").exists()
