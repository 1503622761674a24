"""Scripts of Accelerate and Lightning Fabric, unchanged, by `launch` and by the command.

What is expected of them is what they print under torchrun.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).with_name("programs")
PACKAGES = {"accelerate": "accelerate", "fabric": "lightning_fabric"}
FIRST_LINES = {
    "accelerate": ["2 processes, DistributedType.MULTI_CPU, seen 203"],
    "fabric": ["2 processes, 2 losses, first is True"],
}

pytestmark = pytest.mark.timeout(60)


def output(command: list[str]) -> list[str]:
    """The lines that a command prints."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, cwd=PROGRAMS, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def check(framework: str, lines: list[str]) -> None:
    """One report, of one rank, of what both have done together."""
    *first, last = lines
    assert first == FIRST_LINES[framework]
    found = re.fullmatch(r"accuracy (\d\.\d+), the same weights: True", last)
    assert found, last
    assert float(found[1]) > 0.9


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.faults if name == "fabric" else ()) for name in PACKAGES])
def framework(request: pytest.FixtureRequest) -> str:
    """Not imported here: these packages start threads and set variables."""
    name: str = request.param
    if importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"needs {PACKAGES[name]} (the extra frameworks)")
    return name


def test_as_a_function(framework: str) -> None:
    """The script's `main` in two ranks of `launch`."""
    program = (
        f"import torchcrew; from fw_{framework} import main\nassert torchcrew.launch(main, nprocs=2) == [None, None]"
    )
    check(framework, output([sys.executable, "-c", program]))


@pytest.mark.faults
def test_under_the_command(framework: str) -> None:
    """``torchcrew launch -n 2 script.py``."""
    command = [sys.executable, "-m", "torchcrew.cli", "launch", "-n", "2", f"fw_{framework}.py"]
    lines = output(command)
    assert all(line.startswith("[0] ") for line in lines)
    check(framework, [line.removeprefix("[0] ") for line in lines])
