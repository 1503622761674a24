"""Ways to die, and programs that are run with a deadline and leave nothing running.

    test ── run_program ──► program, own session ──► its workers ──► their subprocesses
              │ token in the environment ────────────────────────────────► inherited by all of them
              └ afterwards: what still lives with the token or in the session is `left_behind`, then killed

Owner      `run_program` owns the program, its session and the files that its output goes to (a pipe would keep the test
           waiting for as long as any orphan holds its other end).
Deadline   SIGABRT to every process: faulthandler prints the stacks of all threads; then SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchcrew.testing import procfs
from torchcrew.testing.procfs import ProcessInfo

__all__ = (
    "CASES",
    "CRASH_TEXT",
    "ENDING_CASES",
    "CrashCase",
    "ProgramResult",
    "die",
    "kill_at_random",
    "processes_with_token",
    "run_program",
)

#: The environment variable that marks every process of a program.
TOKEN_VARIABLE = "TORCHCREW_TEST_TOKEN"
#: Text of the exception that `die("exception")` raises.
CRASH_TEXT = "crashed on purpose"
#: Exit status of `die("exit")`; not 1, which Python uses itself for an exception.
EXIT_CODE = 3
#: How long faulthandler may take to print the stacks at the deadline, in seconds.
DUMP_TIME = 2.0
#: Pause between two looks at processes, in seconds.
PAUSE = 0.01


@dataclass(frozen=True)
class CrashCase:
    """One way in which a process stops serving."""

    name: str
    how: str
    """What `die` takes."""
    exitcode: int | None = None
    """As `Process.exitcode` and `Popen.returncode` give it; None when the process does not end."""

    @property
    def ends(self) -> bool:
        """Whether the process ends, or is there and does nothing."""
        return self.exitcode is not None

    def __str__(self) -> str:
        return self.name


CASES = (
    CrashCase("killed", "sigkill", -signal.SIGKILL),
    CrashCase("segmentation fault", "sigsegv", -signal.SIGSEGV),
    CrashCase("os._exit", "exit", EXIT_CODE),
    CrashCase("abort", "abort", -signal.SIGABRT),
    CrashCase("exception", "exception", 1),
    CrashCase("asleep with the GIL", "gil"),
    CrashCase("stopped", "sigstop"),
)
ENDING_CASES = tuple(case for case in CASES if case.ends)


def die(how: str | CrashCase, *, seconds: float = 60.0, core: bool = False) -> None:
    """Stop serving in the given way; picklable, to be called inside a worker.

    Args:
        how: a `CrashCase` or its ``how``.
        seconds: for ``"gil"``: how long no thread of this process can run Python code.
        core: leave RLIMIT_CORE as it is; otherwise a signal writes no core file.

    Raises:
        RuntimeError: for ``"exception"``, with `CRASH_TEXT`.
        ValueError: ``how`` is not in the table.
    """
    how = how.how if isinstance(how, CrashCase) else how
    if not core:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if how == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()  # a signal to oneself is delivered before `kill` returns only to a single thread
    elif how == "sigsegv":
        ctypes.string_at(0)  # a real fault; a sent SIGSEGV can be ignored, and its siginfo differs
    elif how == "exit":
        os._exit(EXIT_CODE)
    elif how == "abort":
        os.abort()
    elif how == "exception":
        raise RuntimeError(CRASH_TEXT)
    elif how == "gil":
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:  # a signal cuts the call short
            ctypes.PyDLL(None).poll(None, 0, int(left * 1000) + 1)  # unlike CDLL, PyDLL keeps the GIL
    elif how == "sigstop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        raise ValueError(f"how should be one of {', '.join(case.how for case in CASES)}, but got {how!r}")


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended and what was left of it."""

    returncode: int
    """As `Popen.returncode`: minus the signal's number when a signal ended it."""
    stdout: str = field(repr=False)
    stderr: str = field(repr=False)
    seconds: float
    """From the start to the end of the program's first process."""
    timed_out: bool
    """The deadline passed; ``stderr`` has the stacks of all Python threads then."""
    left_behind: tuple[ProcessInfo, ...]
    """Its processes that still lived ``grace`` seconds after the first one ended. They are killed by now."""
    settled: float
    """Seconds from the end of the first process to the end of its last one (to the end of the grace at most)."""

    def check(self) -> ProgramResult:
        """Return this result if the program ended with status 0 in time and left nothing running.

        Raises:
            AssertionError: with all it has printed.
        """
        if self.returncode == 0 and not self.timed_out and not self.left_behind:
            return self
        left = "".join(f"\n  left behind: {process}" for process in self.left_behind)
        raise AssertionError(
            f"the program ended with {self.returncode} after {self.seconds:.2f} s"
            f"{' (deadline passed)' if self.timed_out else ''}{left}\n"
            f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        )


def run_program(
    source_or_path: str | Path,
    *args: str,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    grace: float = 1.0,
    on_start: Callable[[int, str], object] | None = None,
) -> ProgramResult:
    """Run a Python program in its own session, to its end or to the deadline, and end whatever it leaves.

    Args:
        source_or_path: a `str` is the program's text (indented as you like), a `Path` is its file.
        timeout: seconds until it is made to print its stacks and is killed.
        env: changes to this process's environment; an empty value removes the variable.
        grace: seconds that its other processes may outlive it before they count as left behind.
        on_start: called with pid and token once the program is started, for instance to kill it.
    """
    token = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="torchcrew-program-") as folder:
        path = source_or_path
        if isinstance(source_or_path, str):
            path = Path(folder, "program.py")  # not `-c`: a worker that is spawned imports the main module
            path.write_text(textwrap.dedent(source_or_path))
        out, err = Path(folder, "stdout"), Path(folder, "stderr")
        start = time.monotonic()
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, str(path), *args],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=_environment(env, token),
                cwd=cwd,
                start_new_session=True,
            )
        try:
            if on_start is not None:
                on_start(process.pid, token)
            timed_out = not _ends_within(process, timeout - (time.monotonic() - start))
            if timed_out:
                _dump_and_kill(process, token)
            seconds = time.monotonic() - start
            left, settled = _wait_until_gone(process.pid, token, grace)
        finally:
            _kill_all(process, token)
        output, errors = (file.read_bytes().decode(errors="replace") for file in (out, err))
    returncode = -signal.SIGKILL if process.returncode is None else process.returncode  # it hangs in the kernel
    return ProgramResult(returncode, output, errors, seconds, timed_out, left, settled)


def _environment(changes: Mapping[str, str] | None, token: str) -> dict[str, str]:
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1", **(changes or {})}
    # A program that runs programs itself stays marked by the outer one too.
    outer = os.environ.get(TOKEN_VARIABLE)
    environment[TOKEN_VARIABLE] = token if outer is None else f"{outer}:{token}"
    return {name: value for name, value in environment.items() if value != ""}


def processes_with_token(token: str) -> tuple[ProcessInfo, ...]:
    """Return every living process of the program that was started with this token, orphans included."""
    return tuple(procfs.with_environment(TOKEN_VARIABLE, token))


def _living(session: int, token: str) -> tuple[ProcessInfo, ...]:
    """Living processes of a program: those with its token, and those of its session that cleaned their environment."""
    found = set(processes_with_token(token))
    for pid in procfs.pids():
        with contextlib.suppress(OSError):
            info = procfs.read_process(pid) if os.getsid(pid) == session else None
            if info is not None and not info.is_zombie:
                found.add(info)
    return tuple(sorted(found))


def _ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return False
    return True


def _wait_until_gone(session: int, token: str, grace: float) -> tuple[tuple[ProcessInfo, ...], float]:
    start = time.monotonic()
    while True:
        left = _living(session, token)
        waited = time.monotonic() - start
        if not left or waited >= grace:
            return left, min(waited, grace)
        time.sleep(PAUSE)


def _dump_and_kill(process: subprocess.Popen[bytes], token: str) -> None:
    """Have every process of the program print its stacks, then kill its first one."""
    for info in _living(process.pid, token):
        with contextlib.suppress(OSError):
            limits = resource.prlimit(info.pid, resource.RLIMIT_CORE)
            resource.prlimit(info.pid, resource.RLIMIT_CORE, (0, limits[1]))  # the abort shall write no core
            os.kill(info.pid, signal.SIGABRT)
    if not _ends_within(process, DUMP_TIME):
        process.kill()
        _ends_within(process, DUMP_TIME)


def _kill_all(process: subprocess.Popen[bytes], token: str) -> None:
    """Kill until none is left: one that forked just now is seen in the next round."""
    end = time.monotonic() + DUMP_TIME
    while (left := _living(process.pid, token)) and time.monotonic() < end:
        for info in left:
            _kill_process(info)
        time.sleep(PAUSE)
    _ends_within(process, DUMP_TIME)


def _kill_process(info: ProcessInfo) -> bool:
    """Send SIGKILL to exactly this process; False if it is gone, also when its pid is another's by now."""
    try:
        pidfd = os.pidfd_open(info.pid)
    except OSError:
        return False
    try:
        if procfs.read_process(info.pid) != info:
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return True


def kill_at_random(
    pid_source: Callable[[], Collection[int]],
    times: int,
    seed: int,
    *,
    longest_wait: float = 0.05,
    deadline: float = 60.0,
) -> tuple[int, ...]:
    """Send SIGKILL to a random one of the processes at hand, ``times`` times, at random instants.

    It blocks; run it in a thread beside the code under test. A pid that was reused meanwhile is spared as far as its
    start can tell. Which process and how long each wait is depend on ``seed`` only; the machine adds its own noise.

    Args:
        pid_source: gives the pids that may be killed, asked anew each time; none at the moment is waited for.
        longest_wait: seconds; each wait is drawn evenly from 0 to this.
        deadline: seconds after which it stops, with fewer kills.

    Returns:
        The pids that were killed, in order.
    """
    draw = random.Random(seed)
    end = time.monotonic() + deadline
    killed: list[ProcessInfo] = []
    wait = draw.uniform(0.0, longest_wait)
    while len(killed) < times and time.monotonic() < end:
        time.sleep(min(wait, max(0.0, end - time.monotonic())))
        # A busy machine takes its time to end a killed process, which looks alive until then.
        living = [info for info in map(procfs.read_process, sorted(pid_source())) if info and not info.is_zombie]
        candidates = [info for info in living if info not in killed]
        if candidates and _kill_process(victim := draw.choice(candidates)):
            killed.append(victim)
            wait = draw.uniform(0.0, longest_wait)
        else:
            wait = PAUSE / 10
    return tuple(victim.pid for victim in killed)
