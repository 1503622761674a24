"""Options: what is refused, what "auto" means, and which threads ranks have."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import torchcrew
from tests.crew.programs import SOURCE
from tests.launcher import launch_cases as cases
from torchcrew.crew import zygote
from torchcrew.crew.cpus import usable_cores
from torchcrew.launcher import options as options_module
from torchcrew.launcher.options import THREAD_VARIABLES, Options

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module", autouse=True)
def _zygote_ends() -> Iterator[None]:
    yield
    zygote.stop()


@pytest.fixture(autouse=True)
def _no_threads_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user's process that says nothing of threads."""
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def program(code: str, **env: str) -> Any:
    """What a program of its own prints, as JSON."""
    full = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
    full |= {"PYTHONPATH": os.pathsep.join((str(SOURCE), str(SOURCE.parent))), **env}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, env=full, check=False
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("nprocs", 0, ValueError),
        ("nprocs", -1, ValueError),
        ("nprocs", 2.0, TypeError),
        ("nprocs", True, TypeError),
        ("nprocs", "two", TypeError),
        ("nprocs", None, TypeError),
        ("threads_per_rank", 0, ValueError),
        ("threads_per_rank", "all", TypeError),
        ("threads_per_rank", 1.5, TypeError),
        ("timeout", 0, ValueError),
        ("timeout", -1.0, ValueError),
        ("timeout", float("nan"), ValueError),
        ("timeout", "3", TypeError),
        ("timeout", True, TypeError),
        ("start_method", "telepathy", ValueError),
        ("start_method", None, ValueError),
        ("restarts", -1, ValueError),
        ("restarts", "auto", TypeError),
        ("restarts", None, TypeError),
        ("backend", 5, TypeError),
        ("backend", "", ValueError),
        ("logs", 5, TypeError),
        ("logs", True, TypeError),
        ("logs", "", ValueError),
        ("env", "A=1", TypeError),
        ("env", [("A", "1")], TypeError),
        ("env", {"A": 1}, TypeError),
        ("env", {1: "A"}, TypeError),
        ("env", {"A=B": "1"}, ValueError),
        ("env", {"": "1"}, ValueError),
        ("env", {"A": "\0"}, ValueError),
    ],
)
def test_what_cannot_be_meant(name: str, value: Any, error: type[Exception]) -> None:
    """Refused by name, before any process starts, by `launch` and by `Crew`."""
    with pytest.raises(error, match=rf"\b{name}\b"):
        torchcrew.launch(cases.nothing, **{name: value})
    if name != "restarts":
        with pytest.raises(error, match=rf"\b{name}\b"):
            torchcrew.Crew(**{name: value})


def test_a_crew_has_no_restarts() -> None:
    """They are `launch`'s: a crew does not know what to run again."""
    with pytest.raises(TypeError, match="restarts"):
        torchcrew.Crew(2, restarts=1)  # type: ignore[call-arg]


def test_an_unknown_option_is_the_functions() -> None:
    """`launch` hands on what is not its own, and the function says that it does not know it."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'nproc'"):
        torchcrew.launch(cases.who, nprocs=1, nproc=3)


def test_numbers_that_are_whole_but_no_ints_are_taken() -> None:
    """numpy's, as `range` and stock take them."""
    import numpy as np

    assert Options(nprocs=np.int64(3)).ranks() == 3  # type: ignore[arg-type]


def test_options_do_not_change() -> None:
    """Frozen, and not by a dictionary that the user goes on using either."""
    mine = {"A": "1"}
    options = Options(env=mine)
    mine["A"] = "2"
    assert options.environment(1)["A"] == "1"
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.nprocs = 3  # type: ignore[misc]


# Names ----------------------------------------------------------------------------------------------------------------


def test_the_signature_of_launch() -> None:
    """In this order, and all but the function and its arguments by keyword."""
    parameters = inspect.signature(torchcrew.launch).parameters
    assert list(parameters) == [
        *("fn", "args", "nprocs", "backend", "threads_per_rank", "timeout", "start_method", "restarts", "logs", "env"),
        "kwargs",
    ]
    defaults = {name: one.default for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY}
    assert defaults == {
        "nprocs": "auto",
        "backend": "auto",
        "threads_per_rank": "auto",
        "timeout": None,
        "start_method": "zygote",
        "restarts": 0,
        "logs": None,
        "env": None,
    }


def test_options_of_call_and_crew_are_the_same() -> None:
    """One dataclass has them all, in the order of `launch`, with the same defaults."""
    fields = {field.name: field.default for field in dataclasses.fields(Options)}
    of_launch = inspect.signature(torchcrew.launch).parameters
    assert fields == {n: one.default for n, one in of_launch.items() if one.kind is one.KEYWORD_ONLY}
    assert list(fields) == [n for n, one in of_launch.items() if one.kind is one.KEYWORD_ONLY]
    of_crew = inspect.signature(torchcrew.Crew).parameters
    assert {n: one.default for n, one in of_crew.items() if n != "host"} == {
        name: default for name, default in fields.items() if name != "restarts"
    }


def test_looking_at_launch_imports_no_torch() -> None:
    """`torchcrew.launch` and `torchcrew.Crew` as names, a crew that runs nothing, and refused options."""
    loaded = program(
        "import json, sys, torchcrew\n"
        "torchcrew.launch; torchcrew.Crew(2).close(); torchcrew.rank(), torchcrew.world_size()\n"
        "try: torchcrew.launch(print, nprocs=0)\n"
        "except ValueError: pass\n"
        "print(json.dumps([name for name in ('torch', 'numpy', 'rich', 'typer') if name in sys.modules]))"
    )
    assert loaded == []


def test_the_module_imports_no_torch_at_its_top() -> None:
    """Nor may its annotations make it."""
    tree = ast.parse(Path(options_module.__file__).read_text())
    imported = [name.name for node in tree.body if isinstance(node, ast.Import) for name in node.names]
    assert "torch" not in imported


# "auto" ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(8, 2, 4), (8, 3, 2), (2, 2, 1), (2, 3, 1), (1.5, 1, 1), (0.5, 1, 1)]
)
def test_threads_are_the_cores_shared_out(
    cores: float, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded down, at least one."""
    monkeypatch.setattr(options_module, "usable_cores", lambda: cores)
    assert Options().threads(ranks) == threads
    assert Options().environment(ranks).items() >= dict.fromkeys(THREAD_VARIABLES, str(threads)).items()
    assert Options(threads_per_rank=7).threads(ranks) == 7


@pytest.mark.parametrize(("cores", "ranks"), [(4.0, 4), (2.5, 2), (0.5, 1)])
def test_ranks_are_the_cores(cores: float, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU."""
    monkeypatch.setattr(options_module, "usable_cores", lambda: cores)
    monkeypatch.setattr(options_module, "_gpus", lambda: 0)
    assert Options().ranks() == ranks
    assert Options().backend_for(ranks) == "crew"
    assert Options().backend_for(ranks, nodes=2) == "gloo"


def test_ranks_are_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each; more ranks than GPUs have no NCCL, which wants a GPU for each."""
    monkeypatch.setattr(options_module, "_gpus", lambda: 3)
    monkeypatch.setattr(options_module, "_has_nccl", lambda: True)
    assert Options().ranks() == 3
    assert Options().backend_for(3) == "nccl"
    assert Options().backend_for(3, nodes=2) == "nccl"
    assert Options().backend_for(4) == "crew"
    assert Options(backend="mpi").backend_for(3) == "mpi"
    assert Options(backend=None).backend_for(3) is None


def test_the_affinity_counts() -> None:
    """A process that may use one core starts one rank, with one thread."""
    seen = program(
        "import json, os, torchcrew\n"
        "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "from tests.launcher import launch_cases as cases\n"
        "print(json.dumps(torchcrew.launch(cases.threads)))"
    )
    assert len(seen) == 1
    assert seen[0]["torch"] == 1
    assert seen[0]["omp"] == "1"


# The user's own word --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", THREAD_VARIABLES)
def test_a_variable_of_the_user_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not set; `threads_per_rank` as a number is the later word, and `env` the last."""
    monkeypatch.setenv(name, "5")
    assert name not in Options().environment(2)
    assert Options(threads_per_rank=3).environment(2)[name] == "3"
    assert Options(threads_per_rank=3, env={name: "4"}).environment(2)[name] == "4"


@pytest.mark.parametrize("by_env", [False, True])
def test_openmps_variable_is_for_all(by_env: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """MKL and OpenBLAS read it where they have none of their own: so they shall have none of ours."""
    if not by_env:
        monkeypatch.setenv("OMP_NUM_THREADS", "5")
    given = Options(env={"OMP_NUM_THREADS": "5"} if by_env else None).environment(2)
    assert "MKL_NUM_THREADS" not in given
    assert "OPENBLAS_NUM_THREADS" not in given


def test_accelerate_is_told_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user has said something, there or in `env`."""
    name = "ACCELERATE_USE_CPU"
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(options_module, "_gpus", lambda: 0)
    assert Options().environment(2)[name] == "true"
    assert Options(env={name: "false"}).environment(2)[name] == "false"
    monkeypatch.setenv(name, "false")
    assert name not in Options().environment(2)
    monkeypatch.delenv(name)
    monkeypatch.setattr(options_module, "_gpus", lambda: 2)
    assert name not in Options().environment(2)


#: Of start methods that import torch anew in every rank, one is enough.
RARE = (("auto", "spawn"), ("auto", "forkserver"), (3, "forkserver"))

# In the ranks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "threads", "method"),
    [
        pytest.param(2, threads, method, marks=pytest.mark.faults if (threads, method) in RARE else ())
        for threads in ("auto", 3)
        for method in ("zygote", "spawn", "fork", "forkserver")
    ],
)
def test_threads_of_every_pool(method: Any, ranks: int, threads: Any) -> None:
    """torch's, OpenMP's and OpenBLAS's pools are as large as was said, by every start method."""
    wanted = max(1, int(usable_cores()) // ranks) if threads == "auto" else threads
    for seen in torchcrew.launch(cases.threads, nprocs=ranks, threads_per_rank=threads, start_method=method):
        assert seen["torch"] == wanted
        assert seen["omp"] == str(wanted)
        assert set(seen["blas"]) <= {wanted}
        assert set(seen["openmp"]) <= {wanted}


@pytest.mark.parametrize(("ranks"), [1, 2, 3])
def test_auto(ranks: int) -> None:
    """The cores of this process shared out."""
    wanted = max(1, int(usable_cores() / ranks))
    assert {one["torch"] for one in torchcrew.launch(cases.threads, nprocs=ranks)} == {wanted}


def test_few_threads_before_any_is_needed() -> None:
    """A rank with one thread of computing has no pool, and without a group nobody serves one."""
    (alone,) = torchcrew.launch(cases.threads, nprocs=1, threads_per_rank=1, backend=None)
    assert alone["running"] == 1
    for seen in torchcrew.launch(cases.threads, nprocs=2, threads_per_rank=1):
        assert seen["running"] == 1  # what nobody calls asynchronously needs no thread
    for seen in torchcrew.launch(cases.threads, nprocs=2, threads_per_rank=1, backend="gloo"):
        assert seen["running"] <= 6  # gloo's, of two groups' devices, and torch's own


@pytest.mark.parametrize("by_env", [False, True])
def test_the_users_number_wins(by_env: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its environment, or from `env`, in every pool."""
    if not by_env:
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
    env = {"OMP_NUM_THREADS": "3"} if by_env else None
    for seen in torchcrew.launch(cases.threads, nprocs=2, env=env):
        assert (seen["torch"], seen["omp"]) == (3, "3")
        assert set(seen["blas"]) <= {3}


def test_the_launchers_threads_stay() -> None:
    """What ranks get is none of the user's process's business."""
    before = cases.threads()
    torchcrew.launch(cases.nothing, nprocs=2, threads_per_rank=5)
    after = cases.threads()
    assert {**after, "running": 0} == {**before, "running": 0}
    assert not any(name in os.environ for name in THREAD_VARIABLES)
