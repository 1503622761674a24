"""SIGSTOP of a worker, Ctrl-Z and fg, Ctrl-C: nothing hangs, nothing is left."""

from __future__ import annotations

import contextlib
import gc
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crew.programs import survivors, wait_for_state
from tests.data.survival import PROGRAMS, Rows, check, environment, worker_pids
from torchcrew.data import DataLoader
from torchcrew.testing.crash import run_program

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_stopped_worker_meets_the_timeout(persistent: bool) -> None:
    """Stock's text after the time asked for; then closing ends the worker that cannot hear."""
    iterator = iter(DataLoader(Rows(400), batch_size=2, num_workers=2, timeout=1, persistent_workers=persistent))
    next(iterator)
    pids = [worker.pid for worker in iterator._workers]
    os.kill(pids[1], signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"^DataLoader timed out after 1 seconds$"):  # noqa: PT012
        for _ in iterator:
            start = time.monotonic()
    assert 0.9 < time.monotonic() - start < 2.5
    start = time.monotonic()
    del iterator
    assert time.monotonic() - start < 2.0
    assert survivors(pids, 0.5) == []


@pytest.mark.parametrize("both", [False, True])
def test_closing_with_stopped_workers(both: bool) -> None:
    """One or all of them; closing takes no five seconds a worker."""
    iterator = iter(DataLoader(Rows(400), batch_size=2, num_workers=2))
    check(next(iterator), 0, 2)
    pids = [worker.pid for worker in iterator._workers]
    for pid in pids if both else pids[1:]:
        os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    del iterator
    assert time.monotonic() - start < 2.0
    assert survivors(pids, 0.5) == []


def test_a_stopped_worker_goes_on_when_it_is_continued() -> None:
    """Without a timeout the wait simply lasts."""
    iterator = iter(DataLoader(Rows(80), batch_size=2, num_workers=2))
    check(next(iterator), 0, 2)
    pid = iterator._workers[0].pid
    os.kill(pid, signal.SIGSTOP)
    helper = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -CONT {pid}"])
    for number, batch in enumerate(iterator, 1):
        check(batch, number, 2)
    assert number == 39
    helper.wait(5)


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}, {"prefetch_factor": 30}], ids=str)
def test_closing_by_the_garbage_collector(options: dict[str, Any]) -> None:
    """A caught exception makes such cycles. Another crew was forked meanwhile and hides every end of file."""
    iterator = iter(DataLoader(Rows(400), num_workers=2, **options))
    next(iterator)
    other = iter(DataLoader(Rows(400), batch_size=2, num_workers=2))
    check(next(other), 0, 2)
    pids = [worker.pid for worker in iterator._workers]
    cycle: dict[str, Any] = {"iterator": iterator}
    cycle["itself"] = cycle
    del iterator, cycle
    start = time.monotonic()
    gc.collect()
    assert time.monotonic() - start < 2.0
    assert survivors(pids, 0.5) == []
    check(next(other), 1, 2)


@pytest.mark.parametrize("persistent", [False, True])
def test_an_exhausted_iterator_in_a_garbage_cycle(persistent: bool) -> None:
    """It was closed at its end; its `__del__` comes again when its memory may be unmapped already."""
    for _ in range(3):
        iterator = iter(DataLoader(Rows(8), num_workers=1, persistent_workers=persistent))
        assert len(list(iterator)) == 8
        cycle: dict[str, Any] = {"iterator": iterator}
        cycle["itself"] = cycle
        del iterator, cycle
        gc.collect()
    assert worker_pids() == []


# ------------------------------------------------------------------------------------------------------- a terminal


class Job:
    """A trainer as the foreground job of a shell on a terminal."""

    def __init__(self, shell: subprocess.Popen[str], terminal: int, notes: Path) -> None:
        self.shell, self.terminal, self.notes = shell, terminal, notes
        self.pids = [int(pid) for pid in self.read("pids").split()]

    def read(self, name: str) -> str:
        deadline = time.monotonic() + 15
        while not (self.notes / name).exists():
            assert time.monotonic() < deadline, name
            time.sleep(0.01)
        return (self.notes / name).read_text()

    def type(self, key: bytes) -> None:
        os.write(self.terminal, key)

    def says(self) -> str:
        assert self.shell.stdout is not None
        return self.shell.stdout.readline().strip()

    def progresses(self) -> bool:
        before = self.read("progress")
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            if self.read("progress") != before:
                return True
            time.sleep(0.01)
        return False


@contextlib.contextmanager
def on_a_terminal(tmp_path: Path, *options: str) -> Iterator[Job]:
    ours, theirs = pty.openpty()
    errors = (tmp_path / "stderr").open("w")
    shell = subprocess.Popen(
        [
            sys.executable,
            "-c",
            _ON_DESCRIPTOR_3,
            str(theirs),
            str(PROGRAMS / "job_control.py"),
            str(PROGRAMS / "trainer.py"),
            str(tmp_path),
            *options,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        pass_fds=(theirs,),
        start_new_session=True,
        env={**os.environ, **environment()},
    )
    os.close(theirs)
    errors.close()
    job = None
    try:
        job = Job(shell, ours, tmp_path)
        yield job
    finally:
        for pid in job.pids if job is not None else ():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        assert shell.stdin is not None
        assert shell.stdout is not None
        os.close(ours)
        shell.kill()
        shell.wait(5)
        shell.stdin.close()
        shell.stdout.close()


#: Puts the terminal where the shell looks for it, and becomes the shell.
_ON_DESCRIPTOR_3 = """
import os, sys
os.dup2(int(sys.argv[1]), 3, inheritable=True)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def test_ctrl_z_and_fg(tmp_path: Path) -> None:
    """The workers stop with their user and go on with it; twice."""
    with on_a_terminal(tmp_path) as job:
        for _ in range(2):
            assert job.progresses()
            job.type(b"\x1a")
            assert job.says() == f"stopped {int(signal.SIGTSTP)}"
            assert wait_for_state(job.pids, "T", 2.0)
            stopped_at = job.read("progress")
            time.sleep(0.3)
            assert job.read("progress") == stopped_at
            assert job.shell.stdin is not None
            job.shell.stdin.write("fg\n")
            job.shell.stdin.flush()
            assert wait_for_state(job.pids, "SRD", 2.0)
            assert job.progresses()


@pytest.mark.parametrize("persistent", [False, True])
def test_ctrl_c_on_a_terminal(persistent: bool, tmp_path: Path) -> None:
    """One traceback, of the trainer; an exit soon; no worker left."""
    with on_a_terminal(tmp_path, *["persistent"] * persistent) as job:
        assert job.progresses()
        start = time.monotonic()
        job.type(b"\x03")
        assert job.says() == f"ended {-signal.SIGINT}"
        assert time.monotonic() - start < 2.0
        assert survivors(job.pids, 1.0) == []
        errors = (tmp_path / "stderr").read_text()
        assert errors.count("Traceback") == 1, errors
        assert errors.strip().endswith("KeyboardInterrupt"), errors


def test_a_worker_that_uses_the_terminal(tmp_path: Path) -> None:
    """Its group is in the terminal's background: neither `stty tostop` nor reading may stop it for ever."""
    ours, theirs = pty.openpty()
    program = subprocess.Popen(
        [sys.executable, str(PROGRAMS / "terminal_worker.py"), str(theirs)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        pass_fds=(theirs,),
        start_new_session=True,
        env={**os.environ, **environment()},
        cwd=tmp_path,
    )
    os.close(theirs)
    try:
        assert program.communicate(timeout=20)[0] == "OSError\n"
        assert b"sample 2" in os.read(ours, 1000)
    finally:
        program.kill()
        program.wait(5)
        os.close(ours)


def test_sigint_to_the_group_of_a_program_without_a_terminal(tmp_path: Path) -> None:
    """What a notebook server or `timeout -s INT` does."""

    def interrupt(pid: int, _: str) -> None:
        deadline = time.monotonic() + 15
        while not (tmp_path / "progress").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.killpg(pid, signal.SIGINT)

    result = run_program(
        PROGRAMS / "trainer.py", str(tmp_path), timeout=25, env=environment(), cwd=tmp_path, on_start=interrupt
    )
    assert result.returncode == -signal.SIGINT
    assert result.left_behind == ()
    assert result.stderr.count("Traceback") == 1, result.stderr


def test_keyboard_interrupt_that_the_user_catches() -> None:
    """The iterator is closed by its last reference; the loader works again."""
    loader = DataLoader(Rows(400, seconds=0.002), batch_size=2, num_workers=2)
    helper = subprocess.Popen(["sh", "-c", f"sleep 0.4; kill -INT {os.getpid()}"])

    def load() -> Any:
        for number, batch in enumerate(loader):
            check(batch, number, 2)

    with contextlib.suppress(KeyboardInterrupt):
        load()
        load()
    helper.wait(5)
    deadline = time.monotonic() + 1
    while worker_pids() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert worker_pids() == []
    for number, batch in enumerate(loader):
        check(batch, number, 2)
        if number == 5:
            break
