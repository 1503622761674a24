"""`torchcrew doctor`: what matters for multiprocessing on this machine, and what to do about each.

`read_facts` looks at the machine and judges nothing; `diagnose` judges and looks at nothing, so every verdict can be
tried on facts that are made up.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import typer

from torchcrew.crew.cpus import usable_cores

__all__ = ("Facts", "Finding", "diagnose", "doctor_command", "read_facts")

Verdict = Literal["ok", "warn", "bad"]

GIB = 2**30
MIB = 2**20
#: Linux 5.3 has pidfd_open and 5.4 `waitid` on a pidfd: the first kernel on which a worker's death is seen at once.
OLDEST_KERNEL = (5, 4)
#: Stock's DataLoader has every batch that is under way in /dev/shm: four of 100 MB are nothing special.
SMALL_SHM = GIB
#: Stock's sharing strategy costs a descriptor for each tensor that is held.
FEW_DESCRIPTORS = 4096
#: Below this torch itself, with the pipes of some workers, does not fit.
TOO_FEW_DESCRIPTORS = 64
#: Address space that torch and the views of a few workers need.
SMALL_ADDRESS_SPACE = 8 * GIB
#: A process with torch imported, one worker and some batches.
SMALL_MEMORY = 2 * GIB
#: The largest file that one batch may need: a memfd counts as a file.
SMALL_FILE = GIB


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis."""

    name: str
    value: str
    verdict: Verdict = "ok"
    advice: str = ""
    """What to do; empty when nothing is to be done."""


@dataclass(frozen=True)
class Facts:
    """What `read_facts` saw. None stands for unlimited where it is a limit, for absent otherwise; sizes are bytes."""

    python: str
    system: str
    kernel: str
    online_cores: int
    affinity_cores: int
    usable_cores: float
    """By affinity and cgroup quota: 1.5 is possible."""
    physical_memory: int
    memory_limit: int
    shm_total: int | None
    shm_free: int | None
    shm_writable: bool
    descriptors: tuple[int | None, int | None]
    """Soft and hard limit."""
    address_space: int | None
    file_size: int | None
    core_size: int | None
    core_pattern: str
    start_methods: tuple[str, ...]
    """Python's, its default first."""
    torch: str | None
    torch_error: str | None
    """Why torch cannot be imported."""
    torch_cuda: str | None
    """The CUDA version torch was built with."""
    torch_threads: int | None
    cuda_devices: int
    """GPUs that torch can use."""
    omp_num_threads: str | None
    has_memfd: bool
    has_pidfd: bool
    container: str | None
    """What gave the container away."""
    gpus: tuple[str, ...]
    """GPUs the driver knows."""


def read_facts(root: str | os.PathLike[str] = "/") -> Facts:
    """Look at this machine and this process; imports torch. Files are read below ``root``."""
    base = Path(root)
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shm = base / "dev/shm"
    usage = shutil.disk_usage(shm) if shm.is_dir() else None
    torch, torch_error = _import_torch()
    return Facts(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        kernel=platform.release(),
        online_cores=os.cpu_count() or 1,
        affinity_cores=affinity,
        usable_cores=usable_cores(),
        physical_memory=physical,
        memory_limit=_memory_limit(physical),
        shm_total=None if usage is None else usage.total,
        shm_free=None if usage is None else usage.free,
        shm_writable=os.access(shm, os.W_OK),
        descriptors=(_limit("RLIMIT_NOFILE"), _limit("RLIMIT_NOFILE", hard=True)),
        address_space=_limit("RLIMIT_AS"),
        file_size=_limit("RLIMIT_FSIZE"),
        core_size=_limit("RLIMIT_CORE"),
        core_pattern=_text(base / "proc/sys/kernel/core_pattern"),
        start_methods=tuple(multiprocessing.get_all_start_methods()),  # documented: the first is the default
        torch=None if torch is None else str(torch.__version__),
        torch_error=torch_error,
        torch_cuda=None if torch is None else torch.version.cuda,
        torch_threads=None if torch is None else torch.get_num_threads(),
        cuda_devices=0 if torch is None else torch.cuda.device_count(),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        has_memfd=_works(lambda: os.memfd_create("torchcrew-doctor")),
        has_pidfd=_works(lambda: os.pidfd_open(os.getpid())),
        container=_container(base),
        gpus=tuple(
            re.sub(r"^.*?Model:\s*([^\n]*).*$", r"\1", _text(path), flags=re.DOTALL)
            for path in sorted(base.glob("proc/driver/nvidia/gpus/*/information"))
        ),
    )


def _import_torch() -> tuple[Any, str | None]:
    try:
        return import_module("torch"), None
    except ModuleNotFoundError:
        return None, "not installed"
    except (ImportError, OSError, MemoryError) as error:  # a library is missing, or `ulimit -v` leaves no room for one
        return None, f"cannot be imported: {error}"


def _memory_limit(physical: int) -> int:
    try:
        from torchcrew.memory.limits import memory_limit  # its package needs torch
    except (ImportError, OSError, MemoryError):
        return physical
    return memory_limit()


def _limit(name: str, hard: bool = False) -> int | None:
    value = resource.getrlimit(getattr(resource, name))[hard]
    return None if value == resource.RLIM_INFINITY else value


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _works(make_descriptor: Callable[[], int]) -> bool:
    """Whether a system call works here: a seccomp filter refuses what the kernel has."""
    try:
        os.close(make_descriptor())
    except (OSError, AttributeError):
        return False
    return True


def _container(base: Path) -> str | None:
    for mark in (".dockerenv", "run/.containerenv"):
        if (base / mark).exists():
            return f"/{mark}"
    if name := os.environ.get("container"):  # noqa: SIM112 - systemd and podman write it in small letters
        return f"container={name}"
    found = re.search(r"docker|kubepods|containerd|lxc|libpod", _text(base / "proc/1/cgroup"))
    return None if found is None else f"{found[0]} in /proc/1/cgroup"


def diagnose(facts: Facts) -> list[Finding]:
    """Judge every fact."""
    return [
        *(_python(facts), _kernel(facts), _system_calls(facts), _container_found(facts)),
        *(_cores(facts), _memory(facts), _shm(facts), _descriptors(facts)),
        *(_address_space(facts), _file_size(facts), _core_files(facts), _start_methods(facts)),
        *(_torch(facts), _threads(facts), _omp(facts), _gpus(facts)),
    ]


def _python(facts: Facts) -> Finding:
    value = f"{facts.python}, {facts.system}"
    if not facts.system.startswith("Linux"):
        return Finding("python", value, "warn", "Only on Linux torchcrew has its own engine.")
    return Finding("python", value)


def _kernel(facts: Facts) -> Finding:
    match = re.match(r"(\d+)\.(\d+)", facts.kernel)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if facts.system.startswith("Linux") and version < OLDEST_KERNEL:
        return Finding("kernel", facts.kernel, "bad", "torchcrew needs Linux 5.4: it watches processes by pidfd.")
    return Finding("kernel", facts.kernel)


def _system_calls(facts: Facts) -> Finding:
    calls = {"memfd_create": facts.has_memfd, "pidfd_open": facts.has_pidfd}
    value = ", ".join(f"{name} {'works' if works else 'fails'}" for name, works in calls.items())
    if all(calls.values()):
        return Finding("system calls", value)
    return Finding("system calls", value, "bad", "A seccomp profile refuses them: use Docker 20.10 or later.")


def _container_found(facts: Facts) -> Finding:
    return Finding("container", "no" if facts.container is None else f"yes ({facts.container})")


def _cores(facts: Facts) -> Finding:
    value = f"{facts.usable_cores:g} usable ({facts.affinity_cores} by affinity, {facts.online_cores} online)"
    if facts.usable_cores < 2:
        return Finding("cores", value, "warn", "Workers and trainer share one core: use num_workers=1.")
    if facts.usable_cores < facts.online_cores:
        return Finding("cores", value, "ok", f"Count on {facts.usable_cores:g}: os.cpu_count() is too high here.")
    return Finding("cores", value)


def _memory(facts: Facts) -> Finding:
    value = f"{_size(facts.memory_limit)} limit, {_size(facts.physical_memory)} physical"
    if facts.memory_limit < SMALL_MEMORY:
        return Finding("memory", value, "warn", "Few workers and small batches; past the limit the kernel kills.")
    if facts.memory_limit < facts.physical_memory:
        return Finding("memory", value, "ok", "The cgroup's limit counts: past it the kernel kills a process.")
    return Finding("memory", value)


def _shm(facts: Facts) -> Finding:
    if facts.shm_total is None or facts.shm_free is None:
        return Finding("/dev/shm", "missing", "bad", "Python's locks and queues need it: mount a tmpfs there.")
    value = f"{_size(facts.shm_total)}, {_size(facts.shm_free)} free"
    if not facts.shm_writable:
        return Finding("/dev/shm", f"{value}, not writable", "bad", "Python's locks need it: chmod 1777 /dev/shm")
    if facts.shm_free < SMALL_SHM:
        raise_it = "docker run --shm-size=8g" if facts.container else "mount -o remount,size=8G /dev/shm"
        advice = f"Stock's DataLoader fails when its batches fill it; torchcrew's does not use it. Else: {raise_it}"
        return Finding("/dev/shm", value, "warn", advice)
    return Finding("/dev/shm", value)


def _descriptors(facts: Facts) -> Finding:
    soft, hard = facts.descriptors
    value = f"{_count(soft)} soft, {_count(hard)} hard"
    if soft is not None and soft < TOO_FEW_DESCRIPTORS:
        return Finding("descriptors", value, "bad", f"ulimit -n {min(hard or FEW_DESCRIPTORS, FEW_DESCRIPTORS)}")
    if soft is not None and soft < FEW_DESCRIPTORS:
        cure = f"Else: ulimit -n {65536 if hard is None else min(hard, 65536)}" if hard is None or hard > soft else ""
        advice = f"Stock needs one for each tensor that is held; torchcrew a few per worker. {cure}".strip()
        return Finding("descriptors", value, "warn", advice)
    return Finding("descriptors", value)


def _address_space(facts: Facts) -> Finding:
    value = _bytes(facts.address_space)
    if facts.address_space is not None and facts.address_space < SMALL_ADDRESS_SPACE:
        return Finding("address space (ulimit -v)", value, "warn", "Imports and mappings may fail: ulimit -v unlimited")
    return Finding("address space (ulimit -v)", value)


def _file_size(facts: Facts) -> Finding:
    value = _bytes(facts.file_size)
    if facts.file_size is not None and facts.file_size < SMALL_FILE:
        return Finding("file size (ulimit -f)", value, "warn", "Shared memory counts as a file: ulimit -f unlimited")
    return Finding("file size (ulimit -f)", value)


def _core_files(facts: Facts) -> Finding:
    value = f"{_bytes(facts.core_size)}, to {facts.core_pattern or '?'}"
    if facts.core_pattern.startswith("|"):  # the program gets the core whatever the limit is
        return Finding("core files (ulimit -c)", f"handed to {facts.core_pattern[1:].split()[0]}")
    if facts.core_size == 0:
        return Finding("core files (ulimit -c)", "none")
    advice = "A crash of a big process writes a big file (without torchcrew's memory). To have none: ulimit -c 0"
    return Finding("core files (ulimit -c)", value, "ok", advice)


def _start_methods(facts: Facts) -> Finding:
    value = f"{', '.join((*facts.start_methods, 'zygote'))}; Python's default: {facts.start_methods[0]}"
    advice = (
        'torchcrew.data.DataLoader(..., multiprocessing_context="zygote") starts workers in milliseconds, from a '
        "process without your threads; torch's own DataLoader refuses the name."
    )
    return Finding("start methods", value, "ok", advice)


def _torch(facts: Facts) -> Finding:
    if facts.torch is None:
        cure = (
            "Install torch 2.6 or later." if facts.address_space is None else "ulimit -v unlimited, or install torch."
        )
        return Finding("torch", facts.torch_error or "not installed", "bad", cure)
    match = re.match(r"(\d+)\.(\d+)", facts.torch)
    if match and (int(match[1]), int(match[2])) < (2, 6):
        return Finding("torch", facts.torch, "bad", "torchcrew needs torch 2.6 or later.")
    return Finding("torch", facts.torch)


def _threads(facts: Facts) -> Finding:
    if facts.torch_threads is None:
        return Finding("torch's threads", "unknown", "warn", "Install torch first.")
    value = f"{facts.torch_threads} in an operator, {facts.usable_cores:g} usable cores"
    if facts.torch_threads > _whole(facts.usable_cores):
        cure = f"torch.set_num_threads({_whole(facts.usable_cores)})"
        return Finding("torch's threads", value, "warn", f"They take turns and are slower for it: {cure}")
    return Finding("torch's threads", value)


def _omp(facts: Facts) -> Finding:
    value = facts.omp_num_threads
    if value is None:
        return Finding("OMP_NUM_THREADS", "not set")
    number = int(value.partition(",")[0]) if re.fullmatch(r"\d+(,\d+)*", value) else None
    if number is None or number == 0:
        return Finding("OMP_NUM_THREADS", value, "warn", "It should be a positive number: unset it.")
    if number > _whole(facts.usable_cores):
        return Finding("OMP_NUM_THREADS", value, "warn", f"Too many: set {_whole(facts.usable_cores)} or unset it.")
    if number == 1 < _whole(facts.usable_cores):
        return Finding("OMP_NUM_THREADS", value, "warn", "The trainer computes on one core: unset it.")
    return Finding("OMP_NUM_THREADS", value)


def _gpus(facts: Facts) -> Finding:
    found = max(len(facts.gpus), facts.cuda_devices)
    value = f"{found}: {', '.join(facts.gpus)}".removesuffix(": ") if found else "none"
    if facts.gpus and facts.torch is not None and facts.torch_cuda is None:
        return Finding("GPUs", value, "warn", "This torch is built without CUDA: install the CUDA wheel to use them.")
    if facts.gpus and facts.torch_cuda is not None and facts.cuda_devices == 0:
        return Finding("GPUs", value, "warn", "torch sees none: look at CUDA_VISIBLE_DEVICES and the driver's version.")
    return Finding("GPUs", value)


def _whole(cores: float) -> int:
    """How many threads that many cores can run at once."""
    return max(1, math.ceil(cores))


def _size(number: int) -> str:
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / MIB:.0f} MiB"


def _bytes(limit: int | None) -> str:
    return "unlimited" if limit is None else _size(limit)


def _count(limit: int | None) -> str:
    return "unlimited" if limit is None else str(limit)


def doctor_command(
    as_json: bool = typer.Option(False, "--json", help="Print the findings as JSON."),
) -> None:
    """Say what matters for multiprocessing on this machine, and what to do about it.

    The exit status is 1 if something is bad, that is, if torchcrew cannot work here.
    """
    findings = diagnose(read_facts())
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print_table(findings)
    if any(finding.verdict == "bad" for finding in findings):
        raise typer.Exit(1)


def _print_table(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "warn": "yellow", "bad": "bold red"}
    table = Table(title="torchcrew doctor", title_justify="left")
    for column in ("what", "value", "verdict", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        verdict = Text(finding.verdict, style=colours[finding.verdict])
        table.add_row(Text(finding.name), Text(finding.value), verdict, Text(finding.advice))
    # On a pipe rich believes in 80 columns; four columns of text need more.
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
