"""README and docs are programs: every Python block is a file, and every file runs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.warm import WarmPython, warm_python
from torchcrew.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPETS = sorted((ROOT / "docs" / "snippets").glob("*.py"))
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
#: Programs of six seconds and more; what they show is also tested where it is made.
SLOW = ("ask_for_stacks", "launch_torchrun_code", "launch_training", "share_dataset")
INCLUDE = re.compile(r'--8<-- "([^"]+)"')


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (str(page.relative_to(ROOT)), match[2])
        for page in PAGES
        for match in BLOCK.finditer(page.read_text())
        if match[1] == language
    ]


@pytest.fixture(scope="module")
def python() -> Iterator[WarmPython]:
    with warm_python("-W", "error") as python:
        yield python


@pytest.mark.parametrize(("page", "text"), blocks("python"))
def test_python_blocks_are_files(page: str, text: str) -> None:
    """A program in a page is included from a file that is run below, or is the same to the letter."""
    included = INCLUDE.fullmatch(text.strip())
    if included:
        assert (ROOT / included[1]) in SNIPPETS
    else:
        assert text.strip() in [path.read_text().strip() for path in SNIPPETS], f"{page} shows a program no test runs"


def test_console_blocks_name_commands_that_exist() -> None:
    """A line to type starts with a command of ours that exists, or with pip or make and a target that exists."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    typed = [line[2:] for _, text in blocks("console") for line in text.splitlines() if line.startswith("$ ")]
    assert typed
    for line in typed:
        program, what, *_ = line.split()
        if program == "torchcrew":
            assert CliRunner().invoke(app, [what, "--help"]).exit_code == 0, line
        elif program == "make":
            assert what in targets, line
        else:
            assert (program, what) == ("pip", "install"), line


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=pytest.mark.faults if path.stem in SLOW else ())
        for path in SNIPPETS
        if not path.name.startswith("test_")
    ],
)
def test_snippets_run(path: Path, python: WarmPython) -> None:
    """A program of the docs ends well, and without a warning."""
    done = python.run(path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout


@pytest.mark.faults
@pytest.mark.timeout(60)
@pytest.mark.parametrize("path", [p for p in SNIPPETS if not p.name.startswith("test_")], ids=lambda path: path.stem)
def test_snippets_run_in_a_fresh_interpreter(path: Path) -> None:
    """The same without a torch that was imported beforehand."""
    done = subprocess.run([sys.executable, "-W", "error", path], capture_output=True, text=True, timeout=55)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.timeout(60)
def test_the_leak_check_snippet_runs() -> None:
    """The test that the guide shows passes under the plugin it names."""
    path = ROOT / "docs" / "snippets" / "test_no_leaks.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "torchcrew.testing.plugin", "-c", "/dev/null", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, cwd=path.parent)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("tool", ["deviations_page.py", "readme_table.py"])
def test_generated_parts_are_current(tool: str) -> None:
    """What a tool writes into the docs is what it would write now."""
    command = [sys.executable, str(ROOT / "tools" / tool), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
