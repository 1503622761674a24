"""One cell of the table of failures: run it, see what is raised, and when all is dead. No pytest here."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torchcrew
from tests.launcher import failure_cases as cases
from torchcrew.errors import RankDied, RankFailed
from torchcrew.testing import procfs
from torchcrew.testing.crash import TOKEN_VARIABLE, processes_with_token
from torchcrew.testing.procfs import ProcessInfo

#: The promise: seconds from a failure until everything is dead.
PROMISE = 2.0
#: How long jobs are watched going on without their zygote, in seconds.
GO_ON = 0.3


@dataclass(frozen=True)
class Cause:
    """What a `RankFailed` says."""

    kind: str
    text: str
    rank: int | None
    pid: int | None
    host: str | None
    exitcode: int | None
    signal: str | None
    stderr: list[str]


@dataclass(frozen=True)
class Outcome:
    """How a launch ended."""

    kind: str
    text: str
    cause: Cause | None
    moment: float
    """When it was raised, by `time.monotonic`."""

    @classmethod
    def of(cls, error: BaseException | None) -> Outcome:
        """Made of what was raised, at once."""
        moment = time.monotonic()
        if error is None:
            return cls("", "", None, moment)
        failed = error if isinstance(error, RankFailed) else error.__cause__
        cause = None
        if isinstance(failed, RankFailed):
            cause = Cause(
                type(failed).__name__,
                str(failed),
                failed.rank,
                failed.pid,
                failed.host,
                failed.exitcode,
                failed.signal,
                list(failed.stderr),
            )
        return cls(type(error).__name__, str(error), cause, moment)

    def as_note(self) -> dict[str, Any]:
        """For `cases.note`."""
        return asdict(self)

    @classmethod
    def from_note(cls, value: dict[str, Any]) -> Outcome:
        """The other way."""
        cause = None if value["cause"] is None else Cause(**value["cause"])
        return cls(**{**value, "cause": cause})


def outcome_of(call: Callable[[], Any]) -> Outcome:
    """How a call ended, a Ctrl-C included."""
    try:
        call()
    except BaseException as error:
        return Outcome.of(error)
    return Outcome.of(None)


def check(outcome: Outcome, how: str, folder: str | Path) -> None:
    """Whether the error raised says what has happened to the victim, and nothing else."""
    cause = outcome.cause
    assert cause is not None, outcome
    assert (cause.rank, cause.pid) == (cases.VICTIM, cases.rank_pid(folder, cases.VICTIM)), outcome
    assert cause.host == socket.gethostname(), outcome
    assert cases.LAST_WORDS in cause.stderr, outcome
    assert f"rank {cases.VICTIM}" in cause.text, outcome
    assert str(cause.pid) in cause.text, outcome
    assert cases.LAST_WORDS in cause.text, outcome
    for secondary in ("Connection closed", "Connection reset", "PeerDied", "rank 0"):
        assert secondary not in outcome.text + cause.text, outcome
    if how == "raises":
        assert (outcome.kind, outcome.text) == ("Broken", f"{cases.TEXT} (code 42)"), outcome
        assert cause.kind == RankFailed.__name__, outcome
        assert (cause.exitcode, cause.signal) == (None, None), outcome
        for words in ("Traceback", "failure_cases.py", "_raise", cases.TEXT):
            assert words in cause.text, outcome
        return
    assert outcome.kind == cause.kind == RankDied.__name__, outcome
    assert cause.exitcode == cases.EXIT_CODES[how], outcome
    assert cause.signal == (how if how.startswith("SIG") else None), outcome
    assert (cause.signal or f"exit code {cases.EXIT_CODE}") in cause.text, outcome


def living(known: Iterable[ProcessInfo], groups: Iterable[int] = ()) -> set[ProcessInfo]:
    """Those of these processes, and all of these process groups, that have not ended."""
    known, groups = set(known), set(groups)
    found = map(procfs.read_process, procfs.pids() if groups else [info.pid for info in known])
    return {info for info in found if info and not info.is_zombie and (info in known or info.group in groups)}


def wait_until_gone(known: Iterable[ProcessInfo], groups: Iterable[int], since: float) -> float:
    """Wait until all are gone; the seconds from ``since`` on.

    Raises:
        AssertionError: some still live when the promise says that none does.
    """
    groups = set(groups)
    while left := living(known, groups):
        if time.monotonic() - since > PROMISE:
            raise AssertionError(f"{PROMISE:g} s after the failure there still are: {', '.join(map(str, left))}")
        time.sleep(0.002)
    return time.monotonic() - since


@dataclass(frozen=True)
class Measured:
    """Seconds from the failure."""

    raised: float
    dead: float


def ranks_of(folder: str | Path) -> set[int]:
    """Processes, and process groups, of a cell's ranks."""
    return {cases.rank_pid(folder, rank) for rank in (0, 1)}


def rank_fails(folder: str | Path, peer: str, how: str, delay: float = 0.05, **options: Any) -> Measured:
    """Launch a cell in which a rank fails by itself, and check everything."""
    outcome = outcome_of(
        lambda: torchcrew.launch(cases.take_part, os.fspath(folder), peer, how, delay, nprocs=2, **options)
    )
    failed = cases.read(folder, "failed")
    assert failed is not None, outcome
    dead = wait_until_gone(cases.processes(folder), ranks_of(folder), failed)
    check(outcome, how, folder)
    assert outcome.moment - failed < PROMISE, f"raised {outcome.moment - failed:.2f} s after the failure"
    return Measured(outcome.moment - failed, dead)


# The launcher is killed, or its zygote --------------------------------------------------------------------------------


@dataclass
class Program:
    """A running `failure_program.py`."""

    process: subprocess.Popen[str]
    folder: Path
    stderr: Path
    peers: tuple[str, ...]
    token: str

    def folder_of(self, peer: str) -> Path:
        """Where the notes of one of its jobs are."""
        return self.folder / peer

    def wait(self, within: float = 10.0) -> int:
        """Its exit code."""
        return self.process.wait(within)

    def fork(self) -> int:
        """Have a launcher forked ("many"); its pid."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def finish(self) -> int:
        """Have it end ("many"); its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.wait()

    def wait_until_alone(self, since: float, within: float = PROMISE) -> None:
        """Wait until no process but the first one is left.

        Raises:
            AssertionError: some still live when the promise says that none does.
        """
        while left := [info for info in processes_with_token(self.token) if info.pid != self.process.pid]:
            if time.monotonic() - since > within:
                raise AssertionError(f"{within:g} s after the end there still are: {', '.join(map(str, left))}")
            time.sleep(0.01)

    def family(self) -> set[ProcessInfo]:
        """All processes below it."""
        return set(procfs.descendants(self.process.pid))


@contextlib.contextmanager
def program(mode: str, folder: Path, peers: Iterable[str] = (), method: str = "zygote") -> Iterator[Program]:
    """Run the launcher; nothing of it is left afterwards, whatever happens."""
    peers = tuple(peers)
    folder.mkdir(exist_ok=True)
    for peer in peers:
        (folder / peer).mkdir()
    token = secrets.token_hex(8)
    root = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}", TOKEN_VARIABLE: token}
    path = Path(__file__).with_name("failure_program.py")
    stderr = folder / "stderr"
    with stderr.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, str(path), mode, str(folder), method, *peers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            env=environ,
            text=True,
            start_new_session=True,
        )
    try:
        yield Program(process, folder, stderr, peers, token)
        ended = time.monotonic()
        while left := processes_with_token(token):  # whoever else there was, of which nobody knew
            assert time.monotonic() - ended < PROMISE, left
            time.sleep(0.01)
    finally:
        for pid in {process.pid, *(info.pid for info in processes_with_token(token))}:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        process.wait(5)
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


def launcher_dies(
    folder: Path, peers: Iterable[str], signum: int, delay: float = 0.05, method: str = "zygote"
) -> dict[str, float]:
    """Kill a launcher with a job for each peer; seconds until each was dead."""
    with program("together", folder, peers, method) as launcher:
        cases.wait_for(folder, "ready")
        known = {peer: cases.processes(launcher.folder_of(peer)) for peer in launcher.peers}
        groups = {peer: ranks_of(launcher.folder_of(peer)) for peer in launcher.peers}
        everything = launcher.family()
        assert everything >= set().union(*known.values())
        time.sleep(delay)
        assert living(everything) == everything
        since = time.monotonic()
        launcher.process.send_signal(signum)
        assert launcher.wait() == -signum
        # All at once: looking at one after the other would count the time for all.
        dead = _times_of_ends(known, since)
        wait_until_gone(everything, set().union(*groups.values()), since)
    return dead


def _times_of_ends(known: dict[str, set[ProcessInfo]], since: float) -> dict[str, float]:
    dead: dict[str, float] = {}
    while len(dead) < len(known):
        left = living(set().union(*(infos for peer, infos in known.items() if peer not in dead)))
        now = time.monotonic() - since
        dead.update({peer: now for peer, infos in known.items() if peer not in dead and not infos & left})
        if now > PROMISE:
            raise AssertionError(f"{PROMISE:g} s after the failure there still are: {', '.join(map(str, left))}")
        time.sleep(0.002)
    return dead


def launcher_is_interrupted(folder: Path, peers: Iterable[str], delay: float = 0.05) -> dict[str, Measured]:
    """Send Ctrl-C to a launcher in the midst of each job; it is raised once, and ends the launcher as it should."""
    measured = {}
    with program("in-turn", folder, peers) as launcher:
        for peer in launcher.peers:
            notes = launcher.folder_of(peer)
            known, groups = cases.processes(notes), ranks_of(notes)
            time.sleep(delay)
            assert living(known) == known
            since = time.monotonic()
            launcher.process.send_signal(signal.SIGINT)
            dead = wait_until_gone(known, groups, since)
            if peer == launcher.peers[-1]:
                assert launcher.wait() == -signal.SIGINT
                measured[peer] = Measured(time.monotonic() - since, dead)
                continue
            outcome = Outcome.from_note(cases.wait_for(notes, "outcome"))
            assert (outcome.kind, outcome.cause) == ("KeyboardInterrupt", None), outcome
            assert outcome.moment - since < PROMISE, outcome
            measured[peer] = Measured(outcome.moment - since, dead)
        errors = launcher.stderr.read_text()
        assert errors.count("Traceback") == 1, errors
        assert errors.rstrip().endswith("KeyboardInterrupt"), errors
    return measured


def zygote_dies(folder: Path, peers: Iterable[str], how: str = "raises", delay: float = 0.05) -> dict[str, Measured]:
    """Kill the zygotes of a launcher: its jobs go on, and what fails later is as it would be otherwise."""
    with program("together", folder, peers) as launcher:
        zygotes = cases.wait_for(folder, "ready")
        known = {peer: cases.processes(launcher.folder_of(peer)) for peer in launcher.peers}
        everything = set().union(*known.values())
        assert zygotes
        time.sleep(delay)
        for pid in zygotes:
            os.kill(pid, signal.SIGKILL)
        time.sleep(GO_ON)
        assert living(everything) == everything
        for peer in launcher.peers:
            assert cases.read(launcher.folder_of(peer), "outcome") is None
            cases.note(launcher.folder_of(peer), "order", how)
        measured = {peer: _end_of_job(launcher.folder_of(peer), how) for peer in launcher.peers}
        assert launcher.wait() == 0, launcher.stderr.read_text()
    return measured


def _end_of_job(notes: Path, how: str) -> Measured:
    outcome = Outcome.from_note(cases.wait_for(notes, "outcome"))
    failed = cases.read(notes, "failed")
    dead = wait_until_gone(cases.processes(notes), ranks_of(notes), failed)
    check(outcome, how, notes)
    assert outcome.moment - failed < PROMISE, outcome
    return Measured(outcome.moment - failed, dead)
