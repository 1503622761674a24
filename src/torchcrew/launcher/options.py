"""How ranks are to be started: one set of options for `launch`, `Crew` and the command, and what "auto" means here."""

from __future__ import annotations

import math
import numbers
import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torchcrew.crew.cpus import usable_cores

if TYPE_CHECKING:
    StartMethod = Literal["zygote", "spawn", "fork", "forkserver"]

__all__ = ("START_METHODS", "THREAD_VARIABLES", "Host", "Options")

START_METHODS = ("zygote", "spawn", "fork", "forkserver")
#: What OpenMP, MKL and OpenBLAS read when they are loaded.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
#: The one that MKL and OpenBLAS read, too, where they have none of their own.
_FOR_ALL = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Host:
    """The place of this machine's ranks in a job of several machines."""

    node_rank: int
    nodes: int
    address: str
    """Where the ranks meet: the name or number of a host..."""
    port: int
    """... and a port there."""
    first: int
    """The rank of this machine's first."""
    world_size: int
    """Of all machines."""
    run_id: str = ""
    restart_count: int = 0
    max_restarts: int = 0


@dataclass(frozen=True)
class Options:
    """What `launch` and `Crew` take, checked."""

    nprocs: int | Literal["auto"] = "auto"
    """Ranks on this machine. "auto": one for each GPU, without any GPU one for each core this process may use."""
    backend: str | None = "auto"
    """Of the process group: "crew", or any other that `torch.distributed` has. "auto": "nccl" where each rank has a GPU
    of its own, else "crew"; of several machines "gloo". None: no group is made."""
    threads_per_rank: int | Literal["auto"] = "auto"
    """Threads in which a rank computes. "auto": the cores this process may use, divided by the ranks; at least 1."""
    timeout: float | None = None
    """Seconds without any progress of any rank after which the job is taken for hung."""
    start_method: StartMethod = "zygote"
    """How processes are started; all but "zygote" as by `multiprocessing`."""
    restarts: int = 0
    """How often all ranks are started anew after a failure."""
    logs: str | os.PathLike[str] | None = None
    """What becomes of the ranks' output: None: whole lines, as they are. "prefix": each with its rank before it. A
    folder: a file for each rank in it."""
    env: Mapping[str, str] | None = None
    """Variables for the ranks' environment in addition."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name, least in (("nprocs", 1), ("threads_per_rank", 1), ("restarts", 0)):
            object.__setattr__(self, name, _count(name, getattr(self, name), least))
        if self.backend is not None:
            _check_text("backend", self.backend, str)
        if self.logs is not None:
            _check_text("logs", self.logs, (str, os.PathLike))
        _check_timeout(self.timeout)
        if self.start_method not in START_METHODS:
            raise ValueError(f"start_method should be one of {', '.join(START_METHODS)}, but is {self.start_method!r}")
        if self.env is not None:
            _check_env(self.env)
            object.__setattr__(self, "env", dict(self.env))  # the user's may change

    def ranks(self) -> int:
        """How many ranks to start."""
        if self.nprocs != "auto":
            return self.nprocs
        return _gpus() or max(1, math.floor(usable_cores()))

    def backend_for(self, ranks: int, nodes: int = 1) -> str | None:
        """The backend of a group, given how many ranks this machine has, and how many machines take part."""
        if self.backend != "auto":
            return self.backend
        if _gpus() >= ranks and _has_nccl():
            return "nccl"
        # What machines have in common we cannot know from here: whether all have torchcrew's backend, or one /proc.
        return "crew" if nodes == 1 else "gloo"

    def environment(self, ranks: int) -> dict[str, str]:
        """The variables of every rank: threads, where neither the user nor ``env`` has said how many, and ``env``."""
        given = dict(self.env or {})
        auto = self.threads_per_rank == "auto"
        names = [name for name in THREAD_VARIABLES if not (auto and os.environ.get(name))]
        if given.get(_FOR_ALL) or (auto and os.environ.get(_FOR_ALL)):
            names = []  # the user's number is for all libraries
        if not _gpus() and "ACCELERATE_USE_CPU" not in os.environ:
            # Without it Accelerate takes no notice of the other ranks, and each trains alone.
            given.setdefault("ACCELERATE_USE_CPU", "true")
        return {**dict.fromkeys(names, str(self.threads(ranks))), **given}

    def threads(self, ranks: int) -> int:
        """The threads of each rank, given how many ranks this machine has."""
        if self.threads_per_rank != "auto":
            return self.threads_per_rank
        return max(1, math.floor(usable_cores() / ranks))


def _count(name: str, value: object, least: int) -> int | Literal["auto"]:
    """A whole number, of whatever type."""
    auto = name != "restarts"
    if auto and isinstance(value, str) and value == "auto":
        return "auto"
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} should be a whole number{' or auto' * auto}, but is {value!r}") from None
    if number < least:
        raise ValueError(f"{name} should be at least {least}, but is {number}")
    return number


def _check_text(name: str, value: object, kinds: type | tuple[type, ...]) -> None:
    if not isinstance(value, kinds):
        raise TypeError(f"{name} should be a text or None, but is {value!r}")
    if value == "":
        raise ValueError(f"{name} should not be an empty text; None is what there is for none")


def _check_timeout(timeout: object) -> None:
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout should be a number of seconds, or None, but is {timeout!r}")
    if not float(timeout) > 0:
        raise ValueError(f"timeout should be a number of seconds above 0, or None, but is {timeout!r}")


def _check_env(env: object) -> None:
    if not isinstance(env, Mapping):
        raise TypeError(f"env should map names to texts, but is {env!r}")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env should map names to texts, but has {name!r}: {value!r}")
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"env has {name!r}: {value!r}, which no environment can hold")


def _gpus() -> int:
    """GPUs that torch can use. Without a driver there is none, and torch need not be imported to know."""
    if not os.path.exists("/dev/nvidiactl") and not os.path.exists("/dev/kfd") and not os.path.exists("/dev/dxg"):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _has_nccl() -> bool:
    import torch.distributed

    return torch.distributed.is_available() and torch.distributed.is_nccl_available()
