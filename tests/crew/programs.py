"""Programs for tests that end a whole process tree: started, asked for their pids, killed, looked after."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "src"


def state(pid: int) -> str:
    """The state letter of a process; "" when there is none. A zombie (no longer running, not yet reaped) is none."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return "" if letter in "ZX" else letter


def survivors(pids: Iterable[int], within: float) -> list[int]:
    """The processes that still run after `within` seconds; returns at once when none does."""
    deadline = time.monotonic() + within
    while (left := [pid for pid in pids if state(pid)]) and time.monotonic() < deadline:
        time.sleep(0.005)
    return left


def wait_for_state(pids: Iterable[int], letters: str, within: float) -> bool:
    """Whether all processes come to be in one of these states."""
    deadline = time.monotonic() + within
    pids = list(pids)
    while time.monotonic() < deadline:
        if all(state(pid) and state(pid) in letters for pid in pids):
            return True
        time.sleep(0.01)
    return False


class Program:
    """A running Python program, leader of a session of its own, that prints lines of JSON."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.pid = process.pid
        self.pids: set[int] = set()
        self.buffer = b""

    def line(self, within: float = 15.0) -> Any:
        """The next line it prints. Pids in a dict or list of ints are killed at the end of the test."""
        deadline = time.monotonic() + within
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no line within {within} s; so far {self.buffer!r}"
            data = os.read(fd, 65536)
            assert data, f"the program ended with {self.process.wait(5)}; so far {self.buffer!r}"
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        return json.loads(line)

    def workers(self, within: float = 15.0) -> list[int]:
        """The next line, a list of pids, all of which are ended when the test is over."""
        pids: list[int] = self.line(within)
        self.pids.update(pids)
        return pids

    def kill(self, signum: int = signal.SIGKILL) -> None:
        self.process.send_signal(signum)
        if signum == signal.SIGKILL:
            self.process.wait(5)


@contextlib.contextmanager
def running(code: str, *, path: Path | None = None, env: dict[str, str] | None = None) -> Iterator[Program]:
    """Run a program's text (`python -c`, or from the file ``path``, which it is written to)."""
    if path is None:
        arguments = ["-c", code]
    else:
        path.write_text(code)
        arguments = [str(path)]
    full_env = {**os.environ, "PYTHONPATH": str(SOURCE), **(env or {})}
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, env=full_env, start_new_session=True
    )
    program = Program(process)
    try:
        yield program
    finally:
        for pid in (process.pid, *program.pids):
            if pid == process.pid and process.poll() is not None:
                continue
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        process.wait(5)
        assert process.stdout is not None
        process.stdout.close()


def descriptor_counts(pids: Iterable[int]) -> list[int]:
    """How many descriptors each has open, once none has closed one for a while: a message may still be on its way."""
    pids = list(pids)
    deadline = time.monotonic() + 5.0
    counts: list[int] = []
    quiet = 0
    while quiet < 10 and time.monotonic() < deadline:
        now = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]
        quiet, counts = (quiet + 1 if now == counts else 0), now
        time.sleep(0.02)
    return counts


def script(
    tmp_path: Path, text: str, *arguments: str, timeout: float = 40, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a program of its own to its end; it can import this package and these tests."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    return subprocess.run(
        [sys.executable, *arguments, str(path)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(SOURCE), str(SOURCE.parent))), **env},
        check=False,
    )


def run(process: Any, timeout: float = 30.0) -> int | None:
    """Start a process object and wait for its end; returns its exit code."""
    process.start()
    process.join(timeout)
    code: int | None = process.exitcode
    process.close()
    return code
