"""How many cores this process may use: its affinity and the CPU quotas of its cgroups, whichever is less."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ("usable_cores",)

# The octal escapes of /proc/self/mountinfo.
_ESCAPES = {r"\040": " ", r"\011": "\t", r"\012": "\n", r"\134": "\\"}


def usable_cores(root: str | os.PathLike[str] = "/") -> float:
    """Return the cores this process may keep busy; a fraction where a cgroup quota is one (``docker --cpus=1.5``).

    Every cgroup from the process's own to the top counts, in the hierarchies of v1 and v2; one that cannot be read
    counts as unlimited. The quota may change while a process runs, so nothing is kept.

    Args:
        root: where ``proc`` and the cgroup mounts are looked for; another one than ``/`` is for tests.

    Returns:
        At least a small positive number, at most the number of cores in the affinity mask.
    """
    cores = float(len(os.sched_getaffinity(0)))
    return min([cores, *_quotas(Path(root))])


def _quotas(root: Path) -> Iterator[float]:
    """Every quota that bounds this process, in cores."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = list(_cgroup_mounts(root))
    except OSError:
        return
    for line in memberships:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        version = 1 if controllers else 2
        if version == 1 and "cpu" not in controllers.split(","):
            continue
        read = _quota_v1 if version == 1 else _quota_v2
        for mount_version, mount_root, mount_point in mounts:
            if mount_version == version:
                directories = _up_from(root / mount_point.lstrip("/"), mount_root, path)
                yield from (quota for directory in directories if (quota := read(directory)) is not None)


def _cgroup_mounts(root: Path) -> Iterator[tuple[int, str, str]]:
    """The mounted hierarchies that can hold a CPU quota: version, root within the hierarchy, mount point."""
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if len(fields) < 5 or len(tail) < 3:
            continue
        for escaped, plain in _ESCAPES.items():
            fields = [field.replace(escaped, plain) for field in fields]
        if tail[0] == "cgroup2":
            yield 2, fields[3], fields[4]
        elif tail[0] == "cgroup" and "cpu" in tail[-1].split(","):
            yield 1, fields[3], fields[4]


def _up_from(top: Path, mount_root: str, path: str) -> Iterator[Path]:
    """The directories from a process's cgroup up to the mount point.

    In a container the mount may show a part of the hierarchy only (`mount_root`), and a path out of it begins with
    "/..": what cannot be seen is skipped, the mount point is always looked at.
    """
    relative = path
    if mount_root != "/" and (path == mount_root or path.startswith(mount_root.rstrip("/") + "/")):
        relative = path[len(mount_root) :]
    parts = [part for part in relative.split("/") if part]
    if ".." in parts:
        parts = []
    for length in range(len(parts), -1, -1):
        yield top.joinpath(*parts[:length])


def _quota_v2(directory: Path) -> float | None:
    try:
        quota, period = (directory / "cpu.max").read_text().split()[:2]
        return None if quota == "max" else _ratio(int(quota), int(period))
    except (OSError, ValueError):
        return None


def _quota_v1(directory: Path) -> float | None:
    try:
        quota = int((directory / "cpu.cfs_quota_us").read_text())
        return _ratio(quota, int((directory / "cpu.cfs_period_us").read_text()))
    except (OSError, ValueError):
        return None


def _ratio(quota: int, period: int) -> float | None:
    return quota / period if quota > 0 and period > 0 else None
