"""A child that failed and that nobody looked at is named when the process exits, once, in one line."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.crew.programs import SOURCE
from tests.warm import WarmPython, warm_python

pytestmark = pytest.mark.timeout(60)

HEAD = """
import multiprocessing, os, signal, sys, time, warnings
import torchcrew.multiprocessing as mp
from torchcrew.multiprocessing import children
from tests.multiprocessing.process_cases import end, linger, nothing

warnings.simplefilter("ignore")

def start(how, method=METHOD, name=None, target=end, **options):
    process = mp.get_context(method).Process(target=target, args=(how,) if target is end else (), name=name, **options)
    process.start()
    return process

def parent_of_one():
    start(5, name="grandchild")

if __name__ == "__main__":
"""


class Run(Protocol):
    """Runs a program of this file to its end."""

    def __call__(self, body: str, method: str = "fork") -> subprocess.CompletedProcess[str]: ...


@pytest.fixture(scope="module")
def python() -> Iterator[WarmPython]:
    path = os.pathsep.join((str(SOURCE), str(SOURCE.parent)))
    with warm_python(env={**os.environ, "PYTHONPATH": path}) as python:
        yield python


@pytest.fixture
def program(tmp_path: Path, python: WarmPython) -> Run:
    def run(body: str, method: str = "fork") -> subprocess.CompletedProcess[str]:
        lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
        path = tmp_path / "script.py"
        path.write_text(HEAD.replace("METHOD", repr(method)) + lines)
        return python.run(path)

    return run


def noticed(done: subprocess.CompletedProcess[str]) -> str:
    """The notice, without pids; what is not there or there twice shows."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("torchcrew: ")]
    return re.sub(r"pid \d+", "pid", "\n".join(lines))


@pytest.mark.parametrize(
    "method", ["fork", "spawn", *(pytest.param(name, marks=pytest.mark.faults) for name in ("forkserver", "zygote"))]
)
def test_failed_children_are_named(program: Run, method: str) -> None:
    """Joined or not, with exit code or signal; those that ended well are not, and the exit status stays 0."""
    done = program(
        """
first, second = start(3, name="one"), start(-signal.SIGKILL, name="two")
first.join(), second.join()
start(0, name="three").join()
start(-signal.SIGSEGV, name="four")
""",
        method,
    )
    assert done.returncode == 0
    assert noticed(done) == (
        "torchcrew: 3 child processes failed, and nothing looked at the exit code: "
        "one (pid, exit code 3), two (pid, killed by SIGKILL), four (pid, killed by SIGSEGV)"
    )


def test_one_child(program: Run) -> None:
    """The line says which, by its pid, and one child is not many."""
    done = program("p = start('raise', name='p')\np.join()\nprint(p.pid)")
    pid = done.stdout.strip()
    assert f"torchcrew: a child process failed, and nothing looked at the exit code: p (pid {pid}, exit code 1)\n" in (
        done.stderr
    )


QUIET = (
    "p = start(3, name='read'); p.join(); p.exitcode",
    "p = start(3, name='awaited')\nwhile p.exitcode is None: time.sleep(0.01)",
    "p = start(3, name='seen'); p.join(); children.seen(p)",
    "start(None, name='terminated', target=linger).terminate()",
    "start(None, name='killed', target=linger).kill()",
    "p = start(None, name='daemon', target=linger, daemon=True)",
    "start(0, name='well').join()",
    "m = mp.get_context('spawn').Manager(); print(m.list([1])); m.shutdown()",
    "nothing()",
)


def test_no_notice(program: Run) -> None:
    """Exit code read, an error raised about it, ended by the user or as a daemon, or no failure at all."""
    done = program("\n".join(QUIET))
    assert done.returncode == 0
    assert done.stderr == ""  # or it says which


@pytest.mark.faults
@pytest.mark.parametrize("body", QUIET)
def test_no_notice_of_one(program: Run, body: str) -> None:
    """The same for each on its own."""
    done = program(body)
    assert done.returncode == 0
    assert done.stderr == ""


def test_a_loaders_worker_is_the_loaders_to_tell(program: Run) -> None:
    """The error that the loader raises names it already."""
    done = program(
        """
from torchcrew.data import DataLoader
class Deadly(list):
    def __getitem__(self, i): os.kill(os.getpid(), signal.SIGKILL)
try:
    list(DataLoader(Deadly([1]), num_workers=1, multiprocessing_context=mp.get_context("fork")))
except RuntimeError as error:
    print("DataLoader worker (pid" in str(error))
""",
    )
    assert done.stdout == "True\n"
    assert noticed(done) == ""


def test_what_is_no_look(program: Run) -> None:
    """A wait, a question while it still ran, its repr, close; and the death of another."""
    done = program(
        """
p, q = start(3, name="p"), start(4, name="q")
p.exitcode
while p.is_alive(): time.sleep(0.01)
q.join()
print(q.exitcode, p)
mp.active_children()
multiprocessing.connection.wait([p.sentinel], 1)
p.close()
""".replace("p.exitcode\n", "r = start(None, target=linger, name='r'); r.exitcode; r.terminate()\n"),
    )
    assert noticed(done).endswith(": p (pid, exit code 3)")


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.faults)])
def test_a_child_names_its_own_children(program: Run, method: str) -> None:
    """A grandchild's failure is the child's to tell: one line, not two, whatever the method."""
    done = program("p = start(None, target=parent_of_one)\np.join()\nassert p.exitcode == 0", method)
    assert noticed(done) == (
        "torchcrew: a child process failed, and nothing looked at the exit code: grandchild (pid, exit code 5)"
    )


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGINT); time.sleep(5)"])
def test_no_notice_at_these_ends(program: Run, end: str) -> None:
    """`os._exit` runs nothing; after Ctrl-C the children's ends are no news."""
    assert noticed(program(f"start(3).join()\n{end}")) == ""


def test_a_forked_process_that_exits_by_itself_names_nothing(program: Run) -> None:
    """What it inherited are its parent's children."""
    done = program("start(3, name='p').join()\nif os.fork() == 0: sys.exit()\nos.wait()")
    assert noticed(done).count("torchcrew: ") == 1


@pytest.mark.parametrize("end", ["sys.stderr.close()", pytest.param("sys.stderr = None", marks=pytest.mark.faults)])
def test_closed_standard_error(program: Run, end: str) -> None:
    """Nobody to tell: the program ends as ever."""
    done = program(f"start(3).join()\n{end}")
    assert done.returncode == 0


def test_any_object_can_be_said_to_be_seen() -> None:
    """A stock process, one that has not started, and no process at all."""
    import multiprocessing

    import torchcrew.multiprocessing as mp
    from torchcrew.multiprocessing import children

    for thing in (multiprocessing.Process(), mp.Process(), None, 3):
        children.seen(thing)
    assert children.notice() == ""
