"""SIGKILL of the user's process in every state: all below it is gone within a second, and so is its memory.

That nothing stays in /dev/shm is what the leak check of every test sees to: other programs use that folder, too.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.crew.programs import Program, running, state, survivors
from tests.data.survival import PROGRAMS, environment
from torchcrew.testing import procfs

pytestmark = pytest.mark.timeout(40)

#: What the user's process and its workers do when it is killed. Each costs the start of a process with torch; those
#: that differ little from another are for `make test-faults`.
STATES = (
    "gil",
    "back-pressure",
    "subprocess",
    *(
        pytest.param(name, marks=pytest.mark.faults)
        for name in ("iterating", "idle", "busy", "no room", "stopped worker", "from a thread")
    ),
)


def holders(inodes: list[int]) -> list[int]:
    """Processes that map or hold one of these memfds."""
    found = []
    for pid in procfs.pids():
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
            fds = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
            numbers = {os.stat(f"/proc/{pid}/fd/{fd}").st_ino for fd in os.listdir(f"/proc/{pid}/fd")}
        except OSError:
            continue
        lines = [line.split() for line in maps.splitlines() if "/memfd:torchcrew-arena" in line]
        mapped = any(int(line[4]) in inodes for line in lines)
        if mapped or (any("torchcrew-arena" in fd for fd in fds) and numbers & set(inodes)):
            found.append(pid)
    return found


def start(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path, dict[str, str]]:
    monkeypatch.chdir(tmp_path)  # the program leaves notes in its directory
    return (PROGRAMS / "user_death.py").read_text(), tmp_path / "program.py", {**environment(), "STATE": name}


def kill_and_look(program: Program, signum: int = signal.SIGKILL) -> None:
    pids = program.workers(within=25)
    inodes = program.line()
    assert len(pids) >= 2
    assert all(state(pid) for pid in pids)
    assert program.pid in holders(inodes)
    program.kill(signum)
    begin = time.monotonic()
    assert survivors(pids, 1.0) == []
    program.process.wait(5)
    while holders(inodes) and time.monotonic() - begin < 1.5:
        time.sleep(0.01)
    assert holders(inodes) == []


@pytest.mark.parametrize("name", STATES)
def test_the_user_is_killed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers in native code with the GIL, blocked, stopped, with subprocesses: every one goes."""
    code, path, env = start(name, tmp_path, monkeypatch)
    with running(code, path=path, env=env) as program:
        kill_and_look(program)


@pytest.mark.parametrize("name", [pytest.param("spawned", marks=pytest.mark.faults), "zygote"])
def test_the_user_of_other_start_methods_is_killed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are no forks of the user's process, or not even its children."""
    code, path, env = start(name, tmp_path, monkeypatch)
    with running(code, path=path, env=env) as program:
        kill_and_look(program)


@pytest.mark.faults
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGSEGV, signal.SIGHUP])
def test_the_user_ends_by_another_signal(signum: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any signal, not only SIGKILL."""
    monkeypatch.setenv("PYTHONFAULTHANDLER", "")
    code, path, env = start("iterating", tmp_path, monkeypatch)
    with running(code, path=path, env=env) as program:
        kill_and_look(program, signum)


def test_a_stray_fork_that_inherited_every_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lives on and keeps what it inherited; the workers go."""
    code, path, env = start("stray fork", tmp_path, monkeypatch)
    with running(code, path=path, env=env) as program:
        (stray,) = program.workers(within=25)
        pids = [pid for pid in program.workers() if pid != stray]
        assert len(pids) == 2
        program.kill()
        assert survivors(pids, 1.0) == []
        assert state(stray)
