"""The notebook runs from top to bottom, shows what its text says, and leaves nothing of its ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook_launch.ipynb"
PROGRAM = Path(__file__).with_name("notebook_program.py")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def cells(notebook: Path) -> dict[str, dict[str, Any]]:
    """The code cells by their names."""
    return {cell["id"]: cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"}


def text(cell: dict[str, Any]) -> str:
    """What stands below a cell, without pictures and colours."""
    parts = []
    for output in cell["outputs"]:
        lines = output.get("text") or output.get("traceback") or output.get("data", {}).get("text/plain", [])
        parts.append(("\n" if "traceback" in output else "").join(lines))
    return COLOURS.sub("", "\n".join(parts))


def test_it_is_committed_without_outputs() -> None:
    """A picture in every revision would be most of the repository."""
    assert NOTEBOOK.stat().st_size < 20_000
    for cell in cells(NOTEBOOK).values():
        assert (cell["outputs"], cell["execution_count"]) == ([], None)


@pytest.mark.timeout(120)
@pytest.mark.skipif(
    importlib.util.find_spec("nbclient") is None or importlib.util.find_spec("ipykernel") is None,
    reason="needs nbclient and ipykernel (the extra notebook)",
)
def test_it_runs(tmp_path: Path) -> None:
    """Every cell; that the test's leak check finds nothing says that the ranks are gone with the kernel."""
    # Figures go into the cell only under the kernel's own choice of a backend.
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    command = [sys.executable, str(PROGRAM), str(NOTEBOOK), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment)
    assert done.returncode == 0, done.stderr
    found = cells(tmp_path / "done.ipynb")

    shown = text(found["launch"])
    for rank in range(2):
        assert f"rank {rank} of 2 added up 5 rows; all together: 45" in shown.splitlines()
    assert "[tensor([0, 2, 4, 6, 8]), tensor([1, 3, 5, 7, 9])]" in shown

    (error,) = [output for output in found["error"]["outputs"] if output["output_type"] == "error"]
    assert error["ename"] == "IndexError"
    shown = text(found["error"])
    assert re.search(r"RankFailed: rank 1 \(pid \d+ on .+\) raised an exception", shown)
    assert "mine[7]" in shown
    assert "rank 0 (pid" not in shown

    assert text(found["prepare"]) == "[1000, 1000]"
    shares = re.findall(r"(\d+\.\d)%", text(found["close"]))
    assert len(shares) == 2
    assert min(map(float, shares)) > 85
    assert any("image/png" in output.get("data", {}) for output in found["plot"]["outputs"])
