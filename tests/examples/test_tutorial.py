"""The programs that people learn from give the right answers: one import changed, and unchanged under the command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def check(command: list[str], wanted: list[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    # With it, `print` writes a line and its end apart, and other ranks come between.
    environment.pop("PYTHONUNBUFFERED", None)
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(wanted), done.stdout
    for pattern in wanted:
        assert any(re.fullmatch(pattern, line) for line in lines), (pattern, done.stdout)
    assert done.stderr == ""


def test_every_program_is_tested() -> None:
    assert {name.split()[0] for name in PROGRAMS} == {path.stem for path in TUTORIAL.glob("*.py")}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", PROGRAMS)
def test_with_one_import_changed(name: str) -> None:
    arguments, wanted = PROGRAMS[name]
    check([sys.executable, str(TUTORIAL / f"{name.split()[0]}.py"), *arguments], wanted)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", PROGRAMS)
def test_unmodified_under_the_command(name: str, tmp_path: Path) -> None:
    arguments, wanted = PROGRAMS[name]
    source = (TUTORIAL / f"{name.split()[0]}.py").read_text()
    assert source.count(OURS) == 1
    program = tmp_path / f"{name.split()[0]}.py"
    program.write_text(source.replace(OURS, STOCK))
    check([sys.executable, "-m", "torchcrew.cli", "run", "--no-report", str(program), *arguments], wanted)
