"""Programs of every origin start ranks and processes: scripts, `python -c`, standard input, a prompt."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.crew.programs import SOURCE

pytestmark = pytest.mark.timeout(60)


def run(*arguments: str, stdin: str | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    return subprocess.run(
        [sys.executable, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=50,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        check=False,
    )


def check(result: subprocess.CompletedProcess[str]) -> None:
    """It printed what all these programs print: that each rank was right."""
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[(0, 'ok'), (1, 'ok')]", (result.stdout, result.stderr)


HEAD = """
import torchcrew.multiprocessing as mp
from torchcrew.multiprocessing import get_context

class Message:
    def __init__(self, text): self.text = text

def rank(index, queue, message):
    assert type(message) is Message, type(message)
    queue.put((index, message.text))
"""

TAIL = """
queue = get_context("spawn").SimpleQueue()
mp.spawn({function}, (queue, Message("ok")), nprocs=2)
print(sorted(queue.get() for _ in range(2)))
"""


def program(function: str = "rank", before: str = "", guard: bool = True) -> str:
    body = before + TAIL.format(function=function)
    return HEAD + ("if __name__ == '__main__':\n" + textwrap.indent(body, "    ") if guard else body)


#: A function that a script gives, and what has to stand before it.
FUNCTIONS = {
    "function": ("rank", ""),
    "lambda": ("lambda index, queue, message: rank(index, queue, message)", ""),
    "partial": ("functools.partial(lambda mark, *rest: rank(*rest), 'mark')", "import functools\n"),
    "guarded": ("inner", "def inner(index, queue, message):\n    rank(index, queue, message)\n"),
    "closure": ("closure()", "def closure():\n    word = rank\n    return lambda *rest: word(*rest)\n"),
    "method": ("Local().run", "class Local:\n    def run(self, *rest):\n        rank(*rest)\n"),
}


def test_a_script(tmp_path: Path) -> None:
    """Whatever function it gives; the script's classes stay what they are for what goes by value, too."""
    body = "".join(
        f"print({name!r})\n" + before + TAIL.format(function=function) for name, (function, before) in FUNCTIONS.items()
    )
    path = tmp_path / "script.py"
    path.write_text(HEAD + "if __name__ == '__main__':\n" + textwrap.indent(body, "    "))
    result = run(str(path))
    check(result)
    assert result.stdout.splitlines() == [line for name in FUNCTIONS for line in (name, "[(0, 'ok'), (1, 'ok')]")]


@pytest.mark.faults
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_script_with_one(name: str, tmp_path: Path) -> None:
    """The same for each on its own."""
    path = tmp_path / "script.py"
    path.write_text(program(*FUNCTIONS[name]))
    check(run(str(path)))


@pytest.mark.parametrize("name", [pytest.param("package.module", marks=pytest.mark.faults), "package"])
def test_a_module_of_a_package(name: str, tmp_path: Path) -> None:
    """`python -m package.module`, and `python -m package`, whose `__main__` no process imports again."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "module.py").write_text(program())
    (package / "__main__.py").write_text(program())
    check(run("-m", name, cwd=tmp_path))


@pytest.mark.faults
def test_a_folder(tmp_path: Path) -> None:
    """`python folder`."""
    (tmp_path / "__main__.py").write_text(program())
    check(run(str(tmp_path)))


@pytest.mark.parametrize("guard", [False, pytest.param(True, marks=pytest.mark.faults)])
def test_a_command(guard: bool) -> None:
    """`python -c`, which needs no guard: nothing of it is imported."""
    check(run("-c", program(guard=guard)))


@pytest.mark.faults
def test_standard_input() -> None:
    """`python -`."""
    check(run("-", stdin=program(guard=False)))


def test_a_prompt() -> None:
    """Lines that are typed."""
    typed = program(guard=False).replace("\n\ndef", "\ndef").replace("\nqueue =", "\n\nqueue =")
    typed = typed.replace(
        "def __init__(self, text): self.text = text\n", "def __init__(self, text): self.text = text\n\n"
    )
    check(run("-i", "-q", "-", stdin=typed))


def test_what_cannot_be_sent_says_what_to_do(tmp_path: Path) -> None:
    """A lambda that needs a lock."""
    path = tmp_path / "script.py"
    path.write_text(program("lambda *_: lock.acquire()", "import threading\nlock = threading.Lock()\n"))
    result = run(str(path))
    assert result.returncode == 1
    assert "TypeError: cannot pickle '_thread.lock' object" in result.stderr
    if sys.version_info >= (3, 11):
        assert "<lambda>: sent to the new process by value" in result.stderr


PROCESS = """
import torchcrew.multiprocessing as mp
context = mp.get_context({method!r})
class Result:
    pass
queue = context.SimpleQueue()
word = "ok"
processes = [context.Process(target=lambda index=index: queue.put((index, word)), args=()) for index in range(2)]
for process in processes:
    process.start()
for process in processes:
    process.join(30)
print(sorted(queue.get() for _ in range(2)))
"""


@pytest.mark.parametrize(
    "method", ["spawn", *(pytest.param(method, marks=pytest.mark.faults) for method in ("forkserver", "zygote"))]
)
def test_a_process_of_its_own(method: str) -> None:
    """`Process(target=lambda)`, with a queue that the lambda refers to."""
    check(run("-c", PROCESS.format(method=method)))
