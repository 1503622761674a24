"""Usable cores: affinity and cgroup quotas, in trees laid out as the kernel does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchcrew.crew.cpus import usable_cores

V2 = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "33 32 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:10 - cgroup cgroup rw,cpu,cpuacct\n"
V1_MEMORY = "34 32 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def tree(root: Path, cgroup: str, mountinfo: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mountinfo, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v1_files(directory: str, quota: int, period: int = 100000) -> dict[str, str]:
    base = f"sys/fs/cgroup/cpu,cpuacct{directory}"
    return {f"{base}/cpu.cfs_quota_us": f"{quota}\n", f"{base}/cpu.cfs_period_us": f"{period}\n"}


def test_this_process_has_some() -> None:
    """The real machine gives a number between nothing and the affinity."""
    assert 0 < usable_cores() <= len(os.sched_getaffinity(0))


@pytest.mark.usefixtures("eight_cores")
def test_without_proc_the_affinity_counts(tmp_path: Path) -> None:
    """A missing /proc is no error."""
    assert usable_cores(tmp_path) == 8


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"": "max 100000", "/a": "max 100000", "/a/b": "max 100000"}, 8),
        ({"/a": "max 100000", "/a/b": "150000 100000"}, 1.5),
        ({"/a": "200000 100000", "/a/b": "400000 100000"}, 2),
        ({"/a": "1600000 100000"}, 8),
        ({"": "50000 100000"}, 0.5),
        ({"/a/b": "nonsense"}, 8),
    ],
)
def test_version_2_quotas_count_up_to_the_top(tmp_path: Path, limits: dict[str, str], expected: float) -> None:
    """The least of the quotas on the way up is what there is; one that cannot be read is none."""
    files = {f"sys/fs/cgroup{directory}/cpu.max": text + "\n" for directory, text in limits.items()}
    assert usable_cores(tree(tmp_path, "0::/a/b\n", V2.format(root="/"), files)) == expected


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize("path", ["/docker/abc", "/", "/../other", "/docker/abc/inner"])
def test_a_container_sees_its_quota_at_the_mount_point(tmp_path: Path, path: str) -> None:
    """With and without a cgroup namespace, the container's own limit is found."""
    root = "/docker/abc" if path.startswith("/docker") else "/"
    files = {"sys/fs/cgroup/cpu.max": "300000 100000\n"}
    assert usable_cores(tree(tmp_path, f"0::{path}\n", V2.format(root=root), files)) == 3


@pytest.mark.usefixtures("eight_cores")
def test_version_1_quota(tmp_path: Path) -> None:
    """Version 1 keeps quota and period in two files; -1 is no quota."""
    cgroup = "5:memory:/x\n4:cpu,cpuacct:/job/step\n0::/elsewhere\n"
    files = {**v1_files("/job/step", -1), **v1_files("/job", 250000), **v1_files("", -1)}
    assert usable_cores(tree(tmp_path, cgroup, V1_MEMORY + V1.format(root="/"), files)) == 2.5


@pytest.mark.usefixtures("eight_cores")
def test_version_1_in_a_container(tmp_path: Path) -> None:
    """The mount shows the container's part of the hierarchy only."""
    cgroup = "4:cpu,cpuacct:/docker/abc\n"
    assert usable_cores(tree(tmp_path, cgroup, V1.format(root="/docker/abc"), v1_files("", 100000))) == 1


@pytest.mark.usefixtures("eight_cores")
def test_a_mount_point_with_a_space(tmp_path: Path) -> None:
    """The kernel writes it as an octal escape."""
    mountinfo = r"30 23 0:26 / /sys/fs/c\040group rw - cgroup2 cgroup2 rw" + "\n"
    assert usable_cores(tree(tmp_path, "0::/\n", mountinfo, {"sys/fs/c group/cpu.max": "100000 100000\n"})) == 1
