"""A job whose ranks somebody else started: `torchrun`, SLURM, an MPI launcher, or `launch` itself.

    srun, mpirun, torchrun
      ├─ python train.py   launch(fn): outer() says "rank 0 of 2"; run_joined(): fn() here, and all results
      └─ python train.py   launch(fn): outer() says "rank 1 of 2"; the same

Owner      the launcher owns the processes; this one makes its process group, if there is none, and keeps it: a later
           `launch` in the same program finds it, and the program may go on using it. It is destroyed when the program
           ends.
Death      the launcher's business. Who waits for a dead rank in a collective gets the backend's error.
"""

from __future__ import annotations

import atexit
import itertools
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import process
from typing import Any

from torchcrew.crew import rendezvous
from torchcrew.launcher import group
from torchcrew.launcher.identity import number
from torchcrew.launcher.options import Options

__all__ = ("Outer", "hosts", "outer", "run_joined")

#: What says which MPI job this is, one for each launcher that has such a variable.
MPI_JOBS = ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "PMI_JOBID", "LSB_JOBID", "PBS_JOBID", "SLURM_JOB_ID")
#: Where ports made from a job's number begin and how many there are: below those that the system gives away itself.
FIRST_PORT = 15000
PORTS = 15000
#: Step numbers from here on are SLURM's own: the batch script, the interactive step, what runs beside a step.
SPECIAL_STEPS = 0xFFFFFFF0


@dataclass(frozen=True)
class Outer:
    """The job that this process is a rank of."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    """Which of the job's machines this one is."""
    nodes: int
    address: tuple[str, int] | None
    """Where the ranks can meet."""
    missing: str = ""
    """Where they cannot, what the user has to set."""


def outer() -> Outer | None:
    """The job whose rank this process is; None where `launch` has to start the ranks itself.

    A job is what one of these says, in this order: ``RANK`` and ``WORLD_SIZE`` (torchrun, accelerate and `launch`),
    Open MPI, a SLURM step of several tasks (not the batch script that starts it), MPICH or Intel MPI. A single process
    of SLURM or MPI is no job. Agents of `launch` on several machines have a mark, and are ranks of nothing. So are the
    workers and other processes that a rank of `launch` starts by `multiprocessing`.

    Raises:
        ValueError: a variable of these is no number, or does not fit the others; the text has its name.
    """
    if os.environ.get(group.AGENT) or _is_child():
        return None
    return _of_torchrun() or _of_open_mpi() or _of_slurm() or _of_mpich()


def _is_child() -> bool:
    """Whether a rank forked this process, or started it by `multiprocessing`: the variables are not about it.

    A program that a rank runs by `subprocess` is taken for the rank, as a script under torchrun's shell wrapper.
    """
    member = os.environ.get(group.MEMBER)
    return bool(member) and member != str(os.getpid()) and process.parent_process() is not None


def run_joined(
    outer: Outer, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], backend: str | None = "auto"
) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` in this rank and exchange the results; all ranks of the job call it.

    The environment gets what torchrun would have set and nobody has. A process group that is there is used. Else one is
    made, which stays until the program ends. A rank whose function raises tells nobody: its launcher ends the job.

    Args:
        outer: what `outer` said.
        fn: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        backend: of a group that is made. "auto": "nccl" where each rank has a GPU of its own, else "crew", or "gloo"
            where there are several machines. None: none is made for the function, but one of gloo to exchange results.

    Returns:
        The results of all ranks by rank, in every rank.

    Raises:
        ValueError: a group has to be made, and nothing says where the ranks can meet.
        RuntimeError: they could not meet, or another rank ended.
        BaseException: whatever the function raises.
    """
    import torch.distributed as dist

    if not dist.is_available():
        raise RuntimeError("torch was built without torch.distributed, which a rank of another launcher's job needs")
    backend = Options(backend=backend).backend_for(outer.local_world_size, outer.nodes)
    _set_environment(_plan(outer, backend))
    if _ends_groups:  # what is there may be ours, of a former call that wanted another one
        group.release(unless_of=backend)
    if backend is not None and not dist.is_initialized():
        _make_group(outer, backend)
    group.begin_run()
    result = fn(*args, **kwargs)
    for_results = not dist.is_initialized()  # also after code that ends with destroy_process_group
    if for_results:
        _make_group(outer, backend or "gloo")
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    if for_results and backend is None:
        dist.destroy_process_group()
    return results


def hosts(text: str) -> Iterator[str]:
    """The names that one of SLURM's lists of hosts stands for: ``gpu[01-03,7],login``.

    Raises:
        ValueError: it is no such list.
    """
    for item in re.split(r",(?![^\[]*\])", text):  # at the commas outside of brackets
        parts = re.findall(r"\[([^\[\]]+)\]|([^\[\]\s]+)", item)
        if not parts or "".join(f"[{inside}]" if inside else plain for inside, plain in parts) != item:
            raise ValueError(f"{text!r} is no list of hosts")
        yield from map("".join, itertools.product(*(_numbers(i, text) if i else [p] for i, p in parts)))


# Launchers ------------------------------------------------------------------------------------------------------------


def _of_torchrun() -> Outer | None:
    """The variables that torch itself reads."""
    rank = number("RANK")
    if rank is None:
        return None
    size = _needed("WORLD_SIZE", "RANK", least=1)
    address, missing = _address(None, None)
    on_one = address is not None and rendezvous.is_loopback(address[0])
    local_rank = number("LOCAL_RANK")
    if local_rank is None:
        local_rank = rank if on_one else 0
    local_size = number("LOCAL_WORLD_SIZE", least=1) or (size if on_one else local_rank + 1)
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    _check(names, rank, size, local_rank, local_size)
    node = number("GROUP_RANK")
    nodes = number("GROUP_WORLD_SIZE", least=1) or -(-size // local_size)
    node = rank // local_size if node is None else node
    return Outer("torchrun", rank, size, local_rank, local_size, node, nodes, address, missing)


def _of_open_mpi() -> Outer | None:
    names = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    return _of_mpi("Open MPI", names)


def _of_mpich() -> Outer | None:
    return _of_mpi("MPICH", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"))


def _of_mpi(launcher: str, names: tuple[str, ...]) -> Outer | None:
    """A job that says rank, size, and both on this machine, by variables of these names."""
    rank = number(names[0])
    if rank is None:
        return None
    size = _needed(names[1], names[0], least=1)
    if size == 1:
        return None
    local_size = number(names[3], least=1)
    local_rank = number(names[2])
    if local_rank is None:
        local_rank = rank if local_size == size else _needed("LOCAL_RANK", names[0])
    if local_size is None:
        local_size = local_rank + 1
    _check(names, rank, size, local_rank, local_size)
    host = "127.0.0.1" if local_size == size else None
    job = next(filter(None, map(os.environ.get, MPI_JOBS)), None)
    address, missing = _address(host, None if job is None else _port(job))
    nodes = -(-size // local_size)
    return Outer(launcher, rank, size, local_rank, local_size, rank // local_size, nodes, address, missing)


def _of_slurm() -> Outer | None:
    """A step of several tasks. The batch script has ``SLURM_PROCID`` and ``SLURM_NTASKS``, too, but runs once."""
    if os.environ.get("SLURM_STEP_ID") in (None, "", "batch", "extern", "interactive"):
        return None
    step = number("SLURM_STEP_ID")
    rank = number("SLURM_PROCID")
    if step is None or step >= SPECIAL_STEPS or rank is None:
        return None
    name = "SLURM_STEP_NUM_TASKS" if number("SLURM_STEP_NUM_TASKS", least=1) else "SLURM_NTASKS"
    size = number(name, least=1)
    if size is None or size == 1:
        return None
    local_rank = _needed("SLURM_LOCALID", "SLURM_PROCID")
    node = number("SLURM_NODEID") or 0
    nodes = number("SLURM_STEP_NUM_NODES", least=1) or number("SLURM_NNODES", least=1) or 1
    local_size = _tasks_of_node("SLURM_STEP_TASKS_PER_NODE", node) or -(-size // nodes)
    _check(("SLURM_PROCID", name, "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"), rank, size, local_rank, local_size)
    host = "127.0.0.1" if local_size == size else _first_host()
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("SLURM_JOBID")
    address, missing = _address(host, None if job is None else _port(f"{job}.{step}"))
    return Outer("SLURM", rank, size, local_rank, local_size, node, nodes, address, missing)


def _first_host() -> str | None:
    """Where rank 0 of this SLURM step runs.

    The address of the machine on which ``srun`` was called is only the last choice: it may have no rank.
    """
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        text = os.environ.get(name)
        if text:
            try:
                return next(hosts(text))
            except ValueError as error:
                raise ValueError(f"the environment variable {name}: {error}") from None
    return os.environ.get("SLURM_LAUNCH_NODE_IPADDR") or None


def _tasks_of_node(name: str, node: int) -> int | None:
    """How many tasks a node has, by a variable such as ``2(x3),1``: twice three nodes, and one."""
    text = os.environ.get(name)
    if not text:
        return None
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise ValueError(f"the environment variable {name} should be such as '2(x3),1', but is {text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts):
        raise ValueError(f"the environment variable {name} is {text!r}, which has no node {node} (SLURM_NODEID)")
    return counts[node]


def _numbers(ranges: str, text: str) -> list[str]:
    """What the inside of a bracket stands for: ``01-03,7``."""
    found: list[str] = []
    for item in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if match is None:
            raise ValueError(f"{text!r} is no list of hosts")
        first, last = match[1], match[2] or match[1]
        if not int(first) <= int(last) < 1_000_000:
            raise ValueError(f"{text!r} is no list of hosts")
        found += [str(value).zfill(len(first)) for value in range(int(first), int(last) + 1)]
    return found


# What they have in common ---------------------------------------------------------------------------------------------


def _needed(name: str, because: str, least: int = 0) -> int:
    """What a variable says that has to be set because another one is."""
    value = number(name, least)
    if value is None:
        raise ValueError(f"the environment variable {because} is set, but {name} is not: set both or none")
    return value


def _check(names: Sequence[str], rank: int, size: int, local_rank: int, local_size: int) -> None:
    """Raise where these cannot be of one job."""
    for value, name, limit, limits_name in (
        (rank, names[0], size, names[1]),
        (local_rank, names[2], local_size, names[3]),
    ):
        if value >= limit:
            raise ValueError(
                f"the environment variable {name} is {value}, but should be less than {limits_name}, {limit}"
            )
    if local_size > size:
        raise ValueError(f"the environment variable {names[3]} is {local_size}, but {names[1]} only {size}")


def _address(host: str | None, port: int | None) -> tuple[tuple[str, int] | None, str]:
    """Where the ranks meet, by the environment or else as given; and what is missing."""
    host = os.environ.get("MASTER_ADDR") or host
    port = number("MASTER_PORT", least=1) or port
    if host is not None and port is not None:
        return (host, port), ""
    missing = ["MASTER_ADDR to the host of rank 0"] * (host is None) + ["MASTER_PORT to a free port there"] * (
        port is None
    )
    return None, " and ".join(missing)


def _port(job: str) -> int:
    """A port that all ranks of a job find, and those of another one hardly."""
    return FIRST_PORT + zlib.crc32(job.encode()) % PORTS


def _plan(outer: Outer, backend: str | None) -> group.Plan:
    nodes = {"GROUP_RANK": str(outer.node), "GROUP_WORLD_SIZE": str(outer.nodes)}
    return group.Plan(
        rank=outer.rank,
        world_size=outer.world_size,
        local_rank=outer.local_rank,
        local_world_size=outer.local_world_size,
        first=outer.rank - outer.local_rank,
        backend=backend,
        address=outer.address or ("", 0),
        rendezvous=None,
        env=nodes,
    )


def _set_environment(plan: group.Plan) -> None:
    """Set what torchrun would set, but for what is set."""
    for name, value in group.environment(plan).items():
        if not os.environ.get(name) and (plan.address[1] or not name.startswith("MASTER_")):
            os.environ[name] = value
    os.environ[group.MEMBER] = str(os.getpid())


def _make_group(outer: Outer, backend: str) -> None:
    """Make a group that stays until the program ends."""
    global _ends_groups
    if outer.address is None:
        raise ValueError(
            f"this process is rank {outer.rank} of {outer.world_size} of a job that {outer.launcher} started, but "
            f"nothing says where its ranks can meet: set {outer.missing}, the same in all ranks"
        )
    group.make_ready(_plan(outer, backend))
    if not _ends_groups:
        _ends_groups = True
        atexit.register(_end_groups)


_ends_groups = False


def _end_groups() -> None:
    """Do as a program should at its end, unless it ends by an error: peers may be gone then."""
    if getattr(sys, "last_value", None) is None:
        group.forget()
    rendezvous.keep_groups_for_ever()
