"""The programs that people learn from give the right answers: one import changed, and unchanged under the command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.warm import WarmPython, warm_python

TUTORIAL = Path(__file__).parents[2] / "examples" / "tutorial"
STOCK = "import torch.multiprocessing as mp"
OURS = "import torchcrew.multiprocessing as mp"

#: Program and arguments, and what every line of its output must match, in any order of the ranks' own lines.
PROGRAMS: dict[str, tuple[list[str], list[str]]] = {
    "processes_and_ranks": ([], [*(f"rank {rank} of 4" for rank in range(4)), r"exit codes: \[0, 0, 0, 0\]"]),
    "shared_model": (
        [],
        [*(f"rank {rank} made 10 steps" for rank in range(4)), r"loss before 1?\d\.\d\d, after 0\.0\d+"],
    ),
    "shared_model spawn": (
        ["spawn"],
        [*(f"rank {rank} made 10 steps" for rank in range(4)), r"loss before 1?\d\.\d\d, after 0\.0\d+"],
    ),
    "ddp": ([], ["all ranks agree: True", r"loss 0\.0\d+"]),
    "arrays_and_values": ([], [r"array: \[1\.0, 32\.0, 3\.0\]", r"once more: 64\.0"]),
    "shared_tensor": ([], [r"rows: \[1\.0, 2\.0, 3\.0, 4\.0\]"]),
    "asynchronous_tasks": ([], [*(f"task {task} is done" for task in range(4)), r"all done in \d+\.\d s"]),
    "data_parallel": ([], [r"ranks: \[0, 1, 2, 3\]", "the same model gave the same answer: True"]),
    "spawn_first": ([], ["right: True"]),
}


#: Near enough to the program without arguments, and slow.
RARE = ("shared_model spawn",)
#: Those that run unmodified by default, too: the rest differs from them in what the other test has shown already.
UNMODIFIED = ("ddp", "shared_tensor", "spawn_first")


@pytest.fixture(scope="module")
def python() -> Iterator[WarmPython]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with warm_python(env={**environment, "OMP_NUM_THREADS": "2"}) as python:
        yield python


def run(command: list[str], wanted: list[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    # With it, `print` writes a line and its end apart, and other ranks come between.
    environment.pop("PYTHONUNBUFFERED", None)
    check(subprocess.run(command, capture_output=True, text=True, timeout=55, env=environment), wanted)


def check(done: subprocess.CompletedProcess[str], wanted: list[str]) -> None:
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(wanted), done.stdout
    for pattern in wanted:
        assert any(re.fullmatch(pattern, line) for line in lines), (pattern, done.stdout)
    assert done.stderr == ""


def test_every_program_is_tested() -> None:
    assert {name.split()[0] for name in PROGRAMS} == {path.stem for path in TUTORIAL.glob("*.py")}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.faults if name in RARE else ()) for name in PROGRAMS]
)
def test_with_one_import_changed(name: str, python: WarmPython) -> None:
    arguments, wanted = PROGRAMS[name]
    check(python.run(TUTORIAL / f"{name.split()[0]}.py", *arguments), wanted)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in UNMODIFIED else pytest.mark.faults) for name in PROGRAMS]
)
def test_unmodified_under_the_command(name: str, tmp_path: Path) -> None:
    arguments, wanted = PROGRAMS[name]
    source = (TUTORIAL / f"{name.split()[0]}.py").read_text()
    assert source.count(OURS) == 1
    program = tmp_path / f"{name.split()[0]}.py"
    program.write_text(source.replace(OURS, STOCK))
    run([sys.executable, "-m", "torchcrew.cli", "run", "--no-report", str(program), *arguments], wanted)
