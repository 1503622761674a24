"""A job that somebody else started: whose ranks we are, and how they exchange results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from torchcrew.launcher import group, joining

PROGRAM = Path(__file__).parent / "programs" / "joined.py"
needs_distributed = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without torch.distributed"
)
ROOT = Path(__file__).parents[2]
PREFIXES = ("SLURM_", "OMPI_", "PMI", "PALS_", "MPI_", "TORCHELASTIC_", "GROUP_", "ROLE_", "MASTER_", "LSB_", "PBS_")
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "USE_LIBUV")
MARKS = (group.AGENT, group.MEMBER)


@pytest.fixture(autouse=True)
def _by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(PREFIXES) or name in (*NAMES, *MARKS):
            monkeypatch.delenv(name)


def outer(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> joining.Outer | None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return joining.outer()


TORCHRUN = {
    **{"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
    **{"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"},
}
SLURM = {
    **{"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"},
    **{"SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_NODES": "2"},
    **{"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "gpu[07-08]"},
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
}
BATCH = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "4"}
OPEN_MPI = {
    f"OMPI_COMM_WORLD_{name}": value
    for name, value in zip(("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), ("1", "2", "1", "2"), strict=True)
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCHRUN, ("torchrun", 5, 8, 1, 4, 1, 2, ("a", 29500))),
        (TORCHRUN | SLURM, ("torchrun", 5, 8, 1, 4, 1, 2, ("a", 29500))),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ("torchrun", 0, 1, 0, 1, 0, 1, None)),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            ("torchrun", 1, 2, 1, 2, 0, 1, ("localhost", 1)),
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "pod-0", "MASTER_PORT": "1"},
            ("torchrun", 1, 2, 0, 1, 1, 2, ("pod-0", 1)),
        ),
        (SLURM, ("SLURM", 3, 4, 1, 2, 1, 2, ("gpu07", joining._port("77.0")))),
        (SLURM | {"MASTER_ADDR": "m", "MASTER_PORT": "5"}, ("SLURM", 3, 4, 1, 2, 1, 2, ("m", 5))),
        (SLURM | {"SLURM_STEP_NODELIST": ""}, ("SLURM", 3, 4, 1, 2, 1, 2, ("10.0.0.9", joining._port("77.0")))),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": ""}, ("SLURM", 3, 4, 1, 2, 1, 2, ("gpu07", joining._port("77.0")))),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1,3", "SLURM_LOCALID": "2"}, ("SLURM", 3, 4, 2, 3, 1, 2, None)),
        (
            BATCH | {"SLURM_STEP_ID": "2", "SLURM_STEP_NODELIST": "no[such", "SLURM_PROCID": "2", "SLURM_LOCALID": "2"},
            ("SLURM", 2, 4, 2, 4, 0, 1, ("127.0.0.1", joining._port("77.2"))),
        ),
        (SLURM | {"PMI_RANK": "3", "PMI_SIZE": "4"}, ("SLURM", 3, 4, 1, 2, 1, 2, ("gpu07", joining._port("77.0")))),
        (OPEN_MPI, ("Open MPI", 1, 2, 1, 2, 0, 1, None)),
        (
            SLURM | OPEN_MPI | {"PMIX_NAMESPACE": "j@1"},
            ("Open MPI", 1, 2, 1, 2, 0, 1, ("127.0.0.1", joining._port("j@1"))),
        ),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMIX_NAMESPACE": "j"},
            ("Open MPI", 1, 2, 0, 1, 1, 2, None),
        ),
        (MPICH | {"PMI_JOBID": "7"}, ("MPICH", 1, 2, 1, 2, 0, 1, ("127.0.0.1", joining._port("7")))),
        (MPICH | {"MASTER_PORT": "80"}, ("MPICH", 1, 2, 1, 2, 0, 1, ("127.0.0.1", 80))),
    ],
)
def test_whose_rank(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str], expected: tuple[Any, ...]) -> None:
    """Number, size, both on this machine, machine, machines, and where the ranks meet."""
    found = outer(monkeypatch, variables)
    assert found is not None
    seen = (found.launcher, found.rank, found.world_size, found.local_rank, found.local_world_size)
    assert (*seen, found.node, found.nodes) == expected[:-1]
    if expected[-1] is not None:
        assert (found.address, found.missing) == (expected[-1], "")


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"WORLD_SIZE": "4"},
        {"RANK": "", "WORLD_SIZE": ""},
        TORCHRUN | {group.AGENT: "1"},
        SLURM | {group.AGENT: "1"},
        BATCH,
        BATCH | {"SLURM_STEP_ID": "4294967291"},
        BATCH | {"SLURM_STEP_ID": "batch"},
        BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
        BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"},
        OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
)
def test_nobodys_rank(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> None:
    """A process by itself, an agent of ours, a batch script, and a single process of a launcher."""
    assert outer(monkeypatch, variables) is None


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANK": "1"}, "variable RANK is set, but WORLD_SIZE is not"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "variable RANK should be a number from 0 on, but is 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "variable WORLD_SIZE should be a number from 1 on, but is '0'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "variable RANK is 2, but should be less than WORLD_SIZE, 2"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "variable LOCAL_RANK is 4, but should be less than LOCAL_WORLD_SIZE, 4"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "variable LOCAL_WORLD_SIZE is 9, but WORLD_SIZE only 8"),
        (TORCHRUN | {"MASTER_PORT": "p"}, "variable MASTER_PORT should be a number from 1 on, but is 'p'"),
        (SLURM | {"SLURM_STEP_ID": "x"}, "variable SLURM_STEP_ID should be a number"),
        (SLURM | {"SLURM_PROCID": "4"}, "variable SLURM_PROCID is 4, but should be less than SLURM_STEP_NUM_TASKS, 4"),
        (SLURM | {"SLURM_LOCALID": ""}, "variable SLURM_PROCID is set, but SLURM_LOCALID is not"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2"}, "variable SLURM_STEP_TASKS_PER_NODE should be such as"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4"}, "variable SLURM_STEP_TASKS_PER_NODE is '4', which has no node 1"),
        (SLURM | {"SLURM_STEP_NODELIST": "a[1"}, r"variable SLURM_STEP_NODELIST: 'a\[1' is no list of hosts"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": ""}, "variable OMPI_COMM_WORLD_RANK is set, but OMPI_COMM_WORLD_SIZE is"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "-1"}, "variable OMPI_COMM_WORLD_LOCAL_RANK should be a number"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "variable PMI_RANK is set, but LOCAL_RANK is not"),
    ],
)
def test_variables_that_cannot_be(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str], text: str) -> None:
    """The message has the name of the variable."""
    with pytest.raises(ValueError, match=text):
        outer(monkeypatch, variables)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("login", ["login"]),
        ("a,b,c", ["a", "b", "c"]),
        ("n[1-3,7],gpu-a[01-02]b,login", ["n1", "n2", "n3", "n7", "gpu-a01b", "gpu-a02b", "login"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[01,03]", ["r1n01", "r1n03", "r2n01", "r2n03"]),
        ("node-1.cluster,10.0.0.1", ["node-1.cluster", "10.0.0.1"]),
    ],
)
def test_hosts(text: str, expected: list[str]) -> None:
    """SLURM's brackets."""
    assert list(joining.hosts(text)) == expected


@pytest.mark.parametrize(
    "text", ["", ",", "a,,b", "n[", "n[]", "n]", "n[1-]", "n[3-1]", "n[a]", "n[1,]", "[1][", "a b"]
)
def test_no_hosts(text: str) -> None:
    """What is no list is not read as one."""
    with pytest.raises(ValueError, match="is no list of hosts"):
        list(joining.hosts(text))


def test_ports() -> None:
    """The same for all ranks of a job, another one for its next step, and none that the system gives away."""
    ports = {joining._port(f"77.{step}") for step in range(50)}
    assert len(ports) > 45
    assert all(1024 < port < 32768 for port in ports)


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        (OPEN_MPI, "meet: set MASTER_PORT to a free port there, the same"),
        (
            MPICH | {"PMI_RANK": "0", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": ""},
            "set MASTER_ADDR to .* and MASTER_PORT to",
        ),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "set MASTER_ADDR to the host of rank 0, the same"),
    ],
)
def test_no_place_to_meet(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str], missing: str) -> None:
    """The error says what to set; the function is not called."""
    found = outer(monkeypatch, variables)
    assert found is not None
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with pytest.raises(ValueError, match=missing):
        joining.run_joined(found, pytest.fail, ("called",), {}, "gloo")


# Programs -------------------------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def started(ranks: Iterator[dict[str, str]], case: str) -> list[subprocess.Popen[str]]:
    """A process for each rank's variables, as another launcher starts them."""
    command = [sys.executable, str(PROGRAM), case]
    return [
        subprocess.Popen(command, env=environment() | one, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for one in ranks
    ]


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Exit codes and output, by rank; the processes are ended in any case."""
    try:
        return [(process.wait(60), *process.communicate(timeout=10)) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def results(processes: list[subprocess.Popen[str]]) -> list[Any]:
    """What the ranks printed."""
    found = ended(processes)
    assert [(code, errors) for code, _, errors in found] == [(0, "")] * len(processes)
    return [json.loads(text) for _, text, _ in found]


def slurm(count: int) -> Iterator[dict[str, str]]:
    job = {"SLURM_JOB_ID": str(time.time_ns()), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "no-such-host"}
    for rank in range(count):
        yield job | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_NUM_TASKS": str(count)}


def open_mpi(count: int) -> Iterator[dict[str, str]]:
    job = {"PMIX_NAMESPACE": str(time.time_ns())}
    for rank in range(count):
        places = {"RANK": rank, "SIZE": count, "LOCAL_RANK": rank, "LOCAL_SIZE": count}
        yield job | {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in places.items()}


def torchrun(*cases: str) -> subprocess.Popen[str]:
    options = ["--standalone", "--nproc-per-node", "2", str(PROGRAM), *cases]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def check_several(found: list[dict[str, Any]], address: str) -> None:
    """The results of launch after launch are the same in all ranks, and right."""
    for rank, one in enumerate(sorted(found, key=lambda one: str(one["error"]))):
        assert one["first"] == [[0, 2, 6, "crew"], [1, 2, 6, "crew"]]
        assert one["own group"] == [[0, 2, 9, "gloo"], [1, 2, 9, "gloo"]]
        assert one["without"] == [False, False]
        assert one["backends"] == ["cpu:gloo", "gloo"]
        assert one["again"] == [[[0, 2, 3, "crew"], [1, 2, 3, "crew"]]] * 3
        assert one["tensor"] == [[0, 1], [1, 2]]
        assert one["environment"] == [str(rank), str(rank), "2", "2", "0", "1", address]
        assert set(one["listening"]) == {"127.0.0.1"}
        assert one["error"] == f"rank {rank}"


def check_own_group(found: dict[str, Any]) -> None:
    """The program's group was used, and left in its place."""
    assert found == {"total": [[0, 2, 3, "gloo"], [1, 2, 3, "gloo"]], "same": True}


@needs_distributed
@pytest.mark.timeout(90)
def test_torchrun() -> None:
    """A real one: a group of the program's own; many launches; an exception, which leaves the program, and ends all."""
    begun = time.monotonic()
    ((code, text, errors),) = ended([torchrun("user_has_a_group", "several", "one_fails")])
    found = [json.loads(line) for line in text.splitlines()]
    assert len(found) == 4, errors
    for one in found[:2]:
        check_own_group(one)
    check_several(found[2:], "localhost")
    assert code == 1
    assert "KeyError: 'this one'" in errors
    assert time.monotonic() - begun < 80


@needs_distributed
@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    "launcher", [pytest.param(launcher, marks=pytest.mark.faults) for launcher in (slurm, open_mpi)]
)
def test_simulated_launchers(launcher: Any) -> None:
    """With no more than their variables; nothing but the loopback interface is listened at."""
    check_several(results(started(launcher(2), "several")), "127.0.0.1")


@needs_distributed
@pytest.mark.timeout(90)
@pytest.mark.faults
def test_a_group_of_the_program() -> None:
    """Made before the launch, with an address that a simple launcher gives."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(joining._port(str(time.time_ns())))}
    ranks = ({"RANK": str(rank), "WORLD_SIZE": "2", **address} for rank in range(2))
    for found in results(started(ranks, "user_has_a_group")):
        check_own_group(found)


@needs_distributed
@pytest.mark.timeout(90)
@pytest.mark.faults
def test_a_rank_that_is_killed() -> None:
    """Rank 0, which has the store, while another waits for it: an error, not a wait for ever."""
    processes = started(open_mpi(2), "waits")
    try:
        assert processes[0].stdout is not None
        assert processes[0].stdout.readline() == "waiting\n"
    finally:
        processes[0].kill()
        code, _, errors = ended(processes)[1]
    assert code == 1
    assert "RuntimeError" in errors or "DistBackendError" in errors


@needs_distributed
@pytest.mark.timeout(90)
@pytest.mark.faults
def test_a_batch_script_is_no_rank() -> None:
    """Nor is what it starts without srun."""
    assert results(started(iter([BATCH]), "starts_nothing")) == [None]
