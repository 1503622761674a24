"""Whose a native thread is: the shared libraries on its stack.

Pools of OpenMP and BLAS give their threads no name, and a number says nothing. But the kernel tells the stack pointer
of a thread that waits, and a thread's stack names the library that started it: return addresses, and at its upper end
the start routine that glibc keeps there.
"""

from __future__ import annotations

import os
import re
import struct
import sys
from bisect import bisect_right
from pathlib import Path

__all__ = ("POOL_LIBRARIES", "is_of_a_pool", "libraries_of")

#: Libraries whose threads are pools, made once and kept for life. A prefix of the file's name.
POOL_LIBRARIES = (
    *("libgomp", "libiomp", "libomp", "libopenblas", "libscipy_openblas", "libmkl", "libtbb"),
    *("libtorch", "libc10", "libcuda", "libcudart", "libnvrtc"),
)
#: Libraries in every thread's stack, which say nothing of its owner.
_COMMON = ("libc", "libpthread", "ld-linux", "libstdc++", "libgcc_s", "libm", "libdl")

#: How much of a stack is read, in bytes: waiting pool threads use a few kilobytes.
_WINDOW = 1 << 18

_MAP = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \d+ *(.*)$", re.MULTILINE)


def libraries_of(tid: int) -> list[str] | None:
    """Return the libraries on the stack of a waiting thread of this process, the innermost first.

    Returns:
        File names; an empty list while the thread runs (the kernel shows no stack pointer then) or has ended; None
        where the kernel does not tell at all.
    """
    try:
        fields = Path(f"/proc/self/task/{tid}/syscall").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return None if os.path.exists(f"/proc/self/task/{tid}") else []
    except OSError:
        return None
    if len(fields) < 3:
        return []
    return _libraries_on_stack(int(fields[-2], 16), int(fields[-1], 16))


def _libraries_on_stack(stack: int, instruction: int) -> list[str]:
    code: list[tuple[int, int, str]] = []
    top = stack
    for low, high, permissions, path in _MAP.findall(Path("/proc/self/maps").read_text()):
        start, end = int(low, 16), int(high, 16)
        if "x" in permissions and path.startswith("/"):
            code.append((start, end, os.path.basename(path)))
        if start <= stack < end:
            top = end
    words: tuple[int, ...] = ()
    try:
        # Reading one's own memory by file: an address that was unmapped meanwhile is an error, not a crash.
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            data = os.pread(memory.fileno(), min(top - stack, _WINDOW) & ~7, stack)
            words = struct.unpack(f"{len(data) // 8}Q", data)
    except OSError:
        pass
    starts = [start for start, _, _ in code]
    found: dict[str, None] = {}
    for word in (instruction, *words):
        place = bisect_right(starts, word) - 1
        if place >= 0 and word < code[place][1]:
            found[code[place][2]] = None
    return list(found)


def is_of_a_pool(tid: int) -> bool:
    """Whether a native thread belongs to a numeric library's pool: only such libraries are on its stack.

    Where the kernel does not tell, a thread is believed to be one as soon as torch is loaded.
    """
    libraries = libraries_of(tid)
    if libraries is None:
        return "torch" in sys.modules
    telling = [name for name in libraries if not name.startswith(tuple(f"{common}." for common in _COMMON))]
    telling = [name for name in telling if not name.startswith(("ld-linux", "python", "libpython"))]
    return bool(telling) and all(name.startswith(POOL_LIBRARIES) for name in telling)
