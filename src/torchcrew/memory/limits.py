"""How much memory there is: the cgroup's limit, the machine's, and what `ulimit` leaves.

A memory cgroup never answers "no": it kills. So the budget for blocks is ours, and is checked before a page is touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
from pathlib import Path

__all__ = ("BUDGET_VARIABLE", "DEFAULT_SHARE", "default_budget", "file_size_limit", "memory_limit", "parse_bytes")

BUDGET_VARIABLE = "TORCHCREW_BUDGET"
#: Share of the memory limit that blocks may take: the trainer's own memory and the workers' need the rest.
DEFAULT_SHARE = 0.5

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(value: int | float | str, name: str = "memory_budget") -> int:
    """Turn ``2_000_000_000``, ``"2GB"`` or ``"1.5GiB"`` into bytes.

    Raises:
        ValueError: not a positive size; the message names the option.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kmgt]i?|)b?\s*", value, re.IGNORECASE)
        number = float(match[1]) * _UNITS[match[2].lower()] if match else 0
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value)
    else:
        number = 0
    if not 1 <= number < 2**63:
        raise ValueError(
            f"{name} should be a positive number of bytes or a size such as '2GB' or '512MiB', but got {value!r}"
        )
    return int(number)


def _cgroup_limits(root: Path) -> list[int]:
    """Limits of this process's own cgroup and of every one above it (v2 and v1)."""
    limits: list[int] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return limits
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        here = base / path.lstrip("/")
        for folder in (here, *here.parents):
            with contextlib.suppress(OSError, ValueError):  # no such level, or "max"
                limits.append(int((folder / file).read_text()))
            if folder == base:
                break
    return limits


def memory_limit(root: str | os.PathLike[str] = "/") -> int:
    """Bytes this process may use with all others of its cgroup: the tightest of cgroup limits and physical memory."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *_cgroup_limits(Path(root))])


def default_budget() -> int:
    """`TORCHCREW_BUDGET` if set, else half of the memory limit."""
    value = os.environ.get(BUDGET_VARIABLE)
    return parse_bytes(value, BUDGET_VARIABLE) if value else int(memory_limit() * DEFAULT_SHARE)


def file_size_limit() -> int:
    """What `ulimit -f` allows one file, a memfd included, in bytes."""
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return 2**62 if soft == resource.RLIM_INFINITY else soft
