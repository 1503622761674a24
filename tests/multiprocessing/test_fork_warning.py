"""fork with threads or CUDA around: one warning that names them, and the zygote."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.crew.programs import script

pytestmark = pytest.mark.timeout(60)

HEAD = """
import multiprocessing, os, sys, threading, time
import torch
import torchcrew.multiprocessing as mp
from tests.multiprocessing.process_cases import nothing

def fork(context=mp.get_context("fork")):
    process = context.Process(target=nothing)
    process.start()  # HERE
    process.join(20)
    assert process.exitcode == 0

def rest(event):
    event.wait(30)

def beside(name):
    event = threading.Event()
    thread = threading.Thread(target=rest, args=(event,), name=name)
    thread.start()
    return thread, event

if __name__ == "__main__":
"""


def program(tmp_path: Path, body: str, **env: str) -> subprocess.CompletedProcess[str]:
    done = script(tmp_path, HEAD + "".join(f"    {line}\n" for line in body.strip().splitlines()), **env)
    assert done.returncode == 0, done.stderr
    return done


def warnings_in(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if "RuntimeWarning" in line]


def test_a_python_thread_and_cuda_are_named(tmp_path: Path) -> None:
    """With the line that starts the process, the zygote as the way out, and once however often it is executed.

    CUDA is named likewise: a context does not survive a fork.
    """
    done = program(
        tmp_path,
        """
threads = [beside("reader"), beside("writer")]
for _ in range(3): fork()
for t, e in threads: e.set(), t.join()
torch.cuda.is_initialized = lambda: True
fork()
""",
    )
    line, cuda = warnings_in(done)
    assert "with CUDA initialised:" in cuda
    number = next(n for n, text in enumerate((tmp_path / "script.py").read_text().splitlines(), 1) if "HERE" in text)
    assert line.startswith(f"{tmp_path}/script.py:{number}: RuntimeWarning: fork of a process with 2 other threads (")
    assert "reader" in line
    assert "writer" in line
    assert "torchcrew.multiprocessing.set_start_method('zygote')" in line


def test_threads_of_openmp_are_found(tmp_path: Path) -> None:
    """Used by torch in the parent: they have no name, so what they are is said; other methods are quiet."""
    done = program(
        tmp_path,
        "torch.set_num_threads(2)\n(torch.ones(3000, 3000) + 1).exp_()\nfork()\nfork(mp.get_context('spawn'))",
        OMP_NUM_THREADS="2",
    )
    (line,) = warnings_in(done)
    assert "OpenMP" in line


HARMLESS = (
    "fork()",
    "import numpy as np; np.ones((900, 900)) @ np.ones((900, 900)); fork()",
    "t, e = beside('gone'); e.set(); t.join(); fork()",
    "t, e = beside('r'); fork(multiprocessing.get_context('fork')); fork(mp.get_context('zygote')); e.set(); t.join()",
    "q = multiprocessing.Queue(); q.put(1); fork(); q.get(); q.close(); q.join_thread()",
    "mp.set_start_method('spawn', force=True); t, e = beside('r'); fork(mp); e.set()",
)


def test_no_warning(tmp_path: Path) -> None:
    """Nothing there, OpenBLAS (which ends its threads at a fork), threads made for it, other methods, stock's fork."""
    body = "warnings = __import__('warnings'); warnings.simplefilter('always')\n" + "\n".join(HARMLESS)
    assert warnings_in(program(tmp_path, body, OPENBLAS_NUM_THREADS="2", OMP_NUM_THREADS="1")) == []


@pytest.mark.faults
@pytest.mark.parametrize("body", HARMLESS)
def test_no_warning_of_one(tmp_path: Path, body: str) -> None:
    """The same for each on its own."""
    assert warnings_in(program(tmp_path, body, OPENBLAS_NUM_THREADS="2", OMP_NUM_THREADS="1")) == []


def test_loaders_do_not_warn(tmp_path: Path) -> None:
    """A worker of a DataLoader uses no threads of its own; stock forks it under the same circumstances, too."""
    done = program(
        tmp_path,
        """
from torchcrew.data import DataLoader
thread, event = beside("r")
context = mp.get_context("fork")
assert len(list(DataLoader(list(range(8)), num_workers=2, multiprocessing_context=context))) == 8
event.set()
""",
    )
    assert warnings_in(done) == []


def test_as_an_error_it_starts_nothing(tmp_path: Path) -> None:
    """Who turns warnings into errors gets it before the fork, with nothing left behind."""
    done = program(
        tmp_path,
        """
import warnings
warnings.simplefilter("error")
thread, event = beside("r")
fds = len(os.listdir("/proc/self/fd"))
try:
    fork()
except RuntimeWarning as error:
    print(len(os.listdir("/proc/self/fd")) == fds, mp.active_children())
event.set()
""",
    )
    assert done.stdout == "True []\n"
