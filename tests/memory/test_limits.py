"""How much memory there is, told from made-up /proc and /sys trees."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from torchcrew.memory import limits

PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def tree(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


CASES = {
    "v2, own limit": ("0::/a/b\n", {"a/b/memory.max": "1000000\n"}, 1_000_000),
    "v2, a limit above": ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "2000000\n"}, 2_000_000),
    "v2, the tightest": ("0::/a/b\n", {"a/b/memory.max": "3000000\n", "a/memory.max": "2000000\n"}, 2_000_000),
    "v2, at the root of a container": ("0::/\n", {"memory.max": "4000000\n"}, 4_000_000),
    "v2, outside of the namespace": ("0::/../../x\n", {"memory.max": "5000000\n"}, 5_000_000),
    "v2, none": ("0::/a\n", {"a/memory.max": "max\n"}, PHYSICAL),
    "v1": ("5:cpu:/x\n4:memory:/docker/1\n", {"memory/docker/1/memory.limit_in_bytes": "600000\n"}, 600_000),
    "v1, mounted at the container's root": ("4:memory:/docker/1\n", {"memory/memory.limit_in_bytes": "7000\n"}, 7_000),
    "v1, joint controllers": ("4:cpu,memory:/a\n", {"memory/a/memory.limit_in_bytes": "8000\n"}, 8_000),
    "v1, unlimited": ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "9223372036854771712\n"}, PHYSICAL),
    "both": (
        "4:memory:/a\n0::/b\n",
        {"memory/a/memory.limit_in_bytes": "9000\n", "b/memory.max": "10000\n"},
        9_000,
    ),
    "a colon in the name": ("0::/a:b\n", {"a:b/memory.max": "11000\n"}, 11_000),
    "nonsense": ("0::/a\n", {"a/memory.max": "much\n"}, PHYSICAL),
    "no file": ("0::/a\n", {}, PHYSICAL),
    "more than there is": ("0::/a\n", {"a/memory.max": str(PHYSICAL * 2)}, PHYSICAL),
}


@pytest.mark.parametrize("case", CASES)
def test_memory_limit(tmp_path: Path, case: str) -> None:
    """The tightest limit of this cgroup, of those above it, and the machine's memory."""
    cgroup, files, expected = CASES[case]
    assert limits.memory_limit(tree(tmp_path, cgroup, files)) == expected


def test_memory_limit_without_proc(tmp_path: Path) -> None:
    """Then it is the machine's memory."""
    assert limits.memory_limit(tmp_path) == PHYSICAL


def test_memory_limit_of_this_machine() -> None:
    """Something, and not more than there is."""
    assert 0 < limits.memory_limit() <= PHYSICAL


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (2.5, 2),
        ("100", 100),
        ("100B", 100),
        ("2k", 2_000),
        ("2KB", 2_000),
        ("2GB", 2_000_000_000),
        ("1.5GiB", 3 << 29),
        (" 3 mib ", 3 << 20),
        ("1t", 10**12),
        (".5k", 500),
        ("5.", 5),
    ],
)
def test_sizes(value: int | float | str, expected: int) -> None:
    """Numbers and texts with decimal and binary units."""
    assert limits.parse_bytes(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        *(0, -1, 0.5, float("nan"), float("inf"), 2**63, True, None, [], b"1"),
        *("", ".", "1.2.3", "GB", "1PB", "-1", "0", "1 2", "1e9", "2 G B", "nan"),
    ],
)
def test_what_is_no_size(value: object) -> None:
    """An error that names the option and shows the value."""
    with pytest.raises(ValueError, match="some_option should be a positive number of bytes"):
        limits.parse_bytes(value, "some_option")  # type: ignore[arg-type]


def test_the_default_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the memory, or what the environment says."""
    monkeypatch.delenv(limits.BUDGET_VARIABLE, raising=False)
    assert limits.default_budget() == int(limits.memory_limit() * 0.5)
    monkeypatch.setenv(limits.BUDGET_VARIABLE, "2MiB")
    assert limits.default_budget() == 2 << 20
    monkeypatch.setenv(limits.BUDGET_VARIABLE, "lots")
    with pytest.raises(ValueError, match=limits.BUDGET_VARIABLE):
        limits.default_budget()


def test_the_limit_of_a_files_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ulimit -f`, as the kernel gives it."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (5000, resource.RLIM_INFINITY))
    assert limits.file_size_limit() == 5000
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert limits.file_size_limit() == 2**62
