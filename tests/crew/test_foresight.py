"""What the zygote is told to import for a process that trains."""

from __future__ import annotations

import functools
import subprocess
import sys
import types
from pathlib import Path

import pytest

from torchcrew.crew.foresight import TRAINING, expected_imports


def function_of(source: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> types.FunctionType:
    path.write_text(source)
    module = types.ModuleType("program")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "program", module)
    exec(compile(source, str(path), "exec"), vars(module))
    return module.work


@pytest.mark.parametrize(
    ("source", "trains"),
    [
        ("def work():\n    torch.optim.SGD([], 1)\n", True),
        ("from torch import optim\ndef work(): pass\n", True),
        ("def work():\n    DistributedDataParallel(1)\n", True),
        ("def work():\n    options = optimal = 1\n", False),
    ],
)
def test_the_programs_text_tells(source: str, trains: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = function_of(source, tmp_path / "program.py", monkeypatch)
    expected = (TRAINING,) if trains else ()
    assert expected_imports([work]) == expected
    assert expected_imports([functools.partial(work, 1), 3, "optim"]) == expected


@pytest.mark.faults
def test_so_does_what_this_process_has_made() -> None:
    """Making an optimizer imports it in the installed release, in whatever process makes it."""
    program = (
        "import sys, torch\n"
        "from torchcrew.crew.foresight import expected_imports\n"
        "def work(): pass\n"
        "print(expected_imports([work, None, 3, torch.zeros(1), torch.nn.Linear(1, 1).forward]))\n"
        "torch.optim.SGD([torch.zeros(1)], lr=1.0).zero_grad()\n"
        "print(expected_imports([work]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=19, check=True)
    assert done.stdout.splitlines() == ["()", "('torchcrew.crew.training',)"]
