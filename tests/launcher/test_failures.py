"""What the error of a failed rank says, and failures at awkward moments and of awkward kinds."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchcrew
from tests.crew.programs import survivors
from tests.launcher import failure_cases as cases
from tests.launcher import failure_cells as cells
from tests.launcher import failure_errors as errors
from torchcrew.errors import RankDied, RankFailed
from torchcrew.launcher import group

pytestmark = [pytest.mark.timeout(40), pytest.mark.usefixtures("_no_stack_dumps")]

#: A zygote is enough for all; what is asked of it here is what is sent, and not how a rank starts.
NOTES_NEED_311 = "notes"


def raised(fn: Any, *args: Any, **options: Any) -> BaseException:
    """What a launch of two ranks raises."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        torchcrew.launch(fn, *args, **{"nprocs": 2, **options})
    return caught.value


def cause_of(error: BaseException) -> RankFailed:
    """What says where an error comes from."""
    assert isinstance(error.__cause__, RankFailed)
    return error.__cause__


# What is raised -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", errors.AS_THEY_ARE)
def test_an_exception_arrives_as_what_it_is(name: str) -> None:
    """Type, text, args and attributes; and where it was raised."""
    error = raised(errors.raise_one, name)
    expected = errors.AS_THEY_ARE[name]()
    assert type(error).__name__ == type(expected).__name__
    if name != "local class":
        assert type(error) is type(expected)
    assert str(error) == str(expected)
    assert error.args == expected.args or "0x" in str(expected.args)
    left_out = {"lock"}
    for attribute in vars(expected).keys() - left_out:
        value, wanted = getattr(error, attribute), getattr(expected, attribute)
        assert value is error if wanted is expected else _equal(value, wanted), attribute
    cause = cause_of(error)
    assert (cause.rank, cause.host, cause.exitcode, cause.signal) == (1, socket.gethostname(), None, None)
    assert f"rank 1 (pid {cause.pid} on " in str(cause)
    assert "in raise_one" in str(cause)
    assert type(expected).__name__ in str(cause)


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(other, torch.Tensor) else bool(one == other)


@pytest.mark.parametrize("name", errors.AS_TEXT)
def test_what_is_no_exception_is_told(name: str) -> None:
    """It would mean something else in this process: as a KeyboardInterrupt, that somebody pressed Ctrl-C here."""
    error = raised(errors.raise_one, name)
    assert type(error) is RankFailed
    assert error.rank == 1
    assert type(errors.AS_TEXT[name]()).__name__ in str(error)
    assert "in raise_one" in str(error)


@pytest.mark.skipif("not hasattr(__builtins__, 'ExceptionGroup') and __import__('sys').version_info < (3, 11)")
def test_a_group_of_exceptions() -> None:
    """With all that it has."""

    def fail() -> None:
        raise ExceptionGroup("several", [ValueError(1), ExceptionGroup("more", [cases.Broken("inner", 2)])])  # noqa: F821

    error: Any = raised(fail)
    assert type(error).__name__ == "ExceptionGroup"
    assert error.message == "several"
    assert error.exceptions[0].args == (1,)
    inner = error.exceptions[1].exceptions[0]
    assert (type(inner), inner.code) == (cases.Broken, 2)
    assert "inner (code 2)" in str(cause_of(error))


def test_a_chain_is_in_the_text() -> None:
    """The remote traceback has the exception's own cause, too."""
    error = raised(errors.raise_chain)
    assert (type(error), str(error)) == (ValueError, "the effect")
    assert "KeyError: 'the cause'" in str(cause_of(error))


def test_a_text_that_cannot_be_told() -> None:
    """An exception whose text is an error itself is still that exception."""
    error = raised(errors.raise_bad_text)
    assert type(error) is errors.BadText
    assert "BadText" in str(cause_of(error))


def test_an_argument_that_cannot_be_pickled() -> None:
    """It is replaced by what it looks like."""
    error = raised(errors.raise_lock_argument)
    assert type(error) is errors.LockAsArgument
    assert error.args[0] == "a lock"
    assert "lock object" in str(error.args[1])


def test_a_result_that_cannot_be_pickled() -> None:
    """An error of the rank that has it."""
    error = raised(errors.return_lock)
    assert type(error) is TypeError
    assert "lock" in str(error)
    assert cause_of(error).rank in (0, 1)


@pytest.mark.parametrize("how", ["raises", "_exit"])
def test_an_argument_that_cannot_be_unpickled(how: str) -> None:
    """An error of the rank, which is said to come from there."""
    error = raised(errors.nothing, errors.Unloadable(how))
    if how == "raises":
        assert (type(error), str(error)) == (cases.Broken, "while loading (code 1)")
        assert "could not load the function, or its arguments" in "".join(
            getattr(error, "__notes__", ["could not load the function, or its arguments"])
        )
        assert "Traceback" in str(cause_of(error))
    else:
        assert isinstance(error, RankDied)
        assert error.exitcode == cases.EXIT_CODE


def test_an_argument_that_cannot_be_pickled_here() -> None:
    """Nothing was run, and the crew is as before."""
    with torchcrew.Crew(2) as crew:
        assert crew.run(cases.add_up) == [3, 3]
        pids = crew.pids
        with pytest.raises(TypeError, match="lock"):
            crew.run(errors.nothing, threading.Lock())
        assert crew.run(cases.add_up) == [3, 3]
        assert crew.pids == pids


@pytest.mark.parametrize("code", [0, None])
def test_leaving_with_success_is_a_return(code: Any) -> None:
    """As the end of a script by sys.exit()."""
    assert torchcrew.launch(errors.exit_with, code, nprocs=2) == [None, None]


@pytest.mark.parametrize(("code", "exitcode"), [(3, 3), ("no data here", 1), (256 + 4, 4)])
def test_leaving_with_a_code(code: Any, exitcode: int) -> None:
    """The code, and the text that it wrote."""
    error = raised(errors.exit_with, code)
    assert isinstance(error, RankDied)
    assert (error.exitcode, error.signal, error.__cause__) == (exitcode, None, None)
    assert "out before the exit" in error.stderr
    assert code in error.stderr if isinstance(code, str) else True
    assert "out before the exit" in str(error)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGABRT, signal.SIGUSR1, signal.SIGRTMIN + 9])
def test_a_signal_is_named(signum: int) -> None:
    """Also one without a name."""
    error = raised(errors.kill_self, signum)
    assert isinstance(error, RankDied)
    name = signal.Signals(signum).name if signum < signal.SIGRTMIN else f"SIG{signum}"
    assert (error.rank, error.exitcode, error.signal) == (1, -signum, name)
    assert f"was killed by {name}" in str(error)


def test_an_interrupted_rank_does_not_interrupt_this_process() -> None:
    """Somebody sent SIGINT to it."""
    error = raised(errors.kill_self, signal.SIGINT)
    assert type(error) is RankFailed
    assert "KeyboardInterrupt" in str(error)


def test_errors_can_be_pickled() -> None:
    """With all they say: another process may have called launch."""
    error = raised(errors.kill_self, signal.SIGKILL)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (RankDied, str(error), vars(error))


def test_all_ranks_raise_at_once() -> None:
    """One error, whole, of one rank."""
    error = raised(errors.raise_both, nprocs=4)
    rank = cause_of(error).rank
    assert str(error) == f"this is rank {rank}"
    assert f"RuntimeError: this is rank {rank}" in str(error.__cause__)
    assert str(error.__cause__).count("RuntimeError: this is rank") == 1


def test_the_earliest_of_two_is_raised() -> None:
    """Although the other one has failed by the time that is looked at."""
    assert str(raised(errors.raise_one_after_the_other)) == "this is rank 1"


def test_eight_ranks(tmp_path: Path) -> None:
    """One fails, seven wait for it."""

    def fail(folder: str) -> None:
        cases.note_processes(folder)
        if torchcrew.rank() == 5:
            for rank in range(8):
                cases.wait_for(folder, f"rank {rank}")
            cases.fail(folder, "raises")
        torch.distributed.all_reduce(torch.ones(1))

    error = raised(fail, str(tmp_path), nprocs=8)
    assert (type(error), cause_of(error).rank) == (cases.Broken, 5)
    pids = [cases.rank_pid(tmp_path, rank) for rank in range(8)]
    assert survivors(pids, cases.read(tmp_path, "failed") + cells.PROMISE - time.monotonic()) == []


# When it fails --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", cases.FAILURES)
def test_a_rank_fails_while_it_starts(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peers wait for it to make the group with them."""
    stock = group.make_ready

    def make_ready(plan: Any) -> Any:
        cases.note(tmp_path, f"rank {plan.rank}", [(os.getpid(), 0)])
        if plan.rank == 1:
            cases.wait_for(tmp_path, "rank 0")
            time.sleep(0.05)
            cases.fail(tmp_path, how)
        return stock(plan)

    monkeypatch.setattr(group, "make_ready", make_ready)
    outcome = cells.outcome_of(lambda: torchcrew.launch(cases.add_up, nprocs=2, start_method="fork"))
    cells.check(outcome, how, tmp_path)
    assert outcome.moment - cases.read(tmp_path, "failed") < cells.PROMISE
    assert survivors(cells.ranks_of(tmp_path), 0) == []


def test_a_group_that_cannot_be_made() -> None:
    """Nothing is started for it."""
    error = raised(cases.add_up, backend="nonsense")
    assert isinstance(error, ValueError)
    assert "'nonsense' is none of this torch's" in str(error)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_dies_between_two_runs(signum: signal.Signals) -> None:
    """The next run says so, and the one after that has new ranks."""
    with torchcrew.Crew(2) as crew:
        assert crew.run(cases.add_up) == [3, 3]
        first = crew.pids
        os.kill(first[1], signum)
        assert survivors([first[1]], 5) == []
        with pytest.raises(RankDied) as caught:
            crew.run(cases.add_up)
        assert (caught.value.rank, caught.value.pid, caught.value.signal) == (1, first[1], signum.name)
        assert survivors(first, 0) == []
        assert crew.pids == ()
        assert crew.run(cases.add_up) == [3, 3]
        assert not set(crew.pids) & set(first)


def test_a_rank_dies_while_the_crew_closes() -> None:
    """There is nobody to whom it would matter."""

    def prepare() -> int:
        import atexit

        atexit.register(os.kill, os.getpid(), signal.SIGKILL)
        return os.getpid()

    with torchcrew.Crew(2) as crew:
        pids = crew.run(prepare)
    assert survivors(pids, 0) == []


@pytest.mark.parametrize("kind", errors.OBSTINATE)
def test_a_rank_that_does_not_end_easily_is_ended(kind: str, tmp_path: Path) -> None:
    """Because another one has failed: in time."""
    with contextlib.redirect_stdout(None):
        outcome = cells.outcome_of(
            lambda: torchcrew.launch(
                errors.be_obstinate, str(tmp_path), kind, "raises", nprocs=2, logs=tmp_path / "logs"
            )
        )
    failed = cases.read(tmp_path, "failed")
    if kind != "stopped":
        cells.wait_until_gone(cases.processes(tmp_path), cells.ranks_of(tmp_path), failed)
        cells.check(outcome, "raises", tmp_path)
    assert outcome.kind == "Broken"
    assert outcome.moment - failed < cells.PROMISE


@pytest.mark.parametrize("kind", ["ignores SIGTERM", "thread", "exit handler", "fork"])
def test_a_failed_rank_that_does_not_end_easily_is_ended(kind: str, tmp_path: Path) -> None:
    """The one that has failed itself."""
    outcome = cells.outcome_of(lambda: torchcrew.launch(errors.be_obstinate, str(tmp_path), kind, "self", nprocs=2))
    cells.wait_until_gone(cases.processes(tmp_path), cells.ranks_of(tmp_path), cases.read(tmp_path, "failed"))
    cells.check(outcome, "raises", tmp_path)


@pytest.mark.parametrize("kind", ["thread", "exit handler", "stopped"])
def test_a_rank_that_will_not_close_is_ended(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time that it has for that; the results are there nevertheless."""
    from torchcrew.launcher import team

    monkeypatch.setattr(team, "CLOSE_TIMEOUT", 0.5)
    pids = torchcrew.launch(errors.stay_obstinate, str(tmp_path), kind, nprocs=2)
    assert survivors(pids, 0) == []


# Restarts -------------------------------------------------------------------------------------------------------------


def test_restarts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All ranks start anew after each failure, which is told, until it works."""
    with caplog.at_level(logging.WARNING, "torchcrew"):
        assert torchcrew.launch(errors.fail_until, str(tmp_path), 2, nprocs=2, restarts=2) == [3, 3]
    messages = [record.getMessage() for record in caplog.records if record.name == "torchcrew"]
    assert len(messages) == 2
    assert "attempt (code 0)" in messages[0]
    assert "1 of 2" in messages[0]
    assert "attempt (code 1)" in messages[1]


def test_no_restart_is_left(tmp_path: Path) -> None:
    """The last failure is raised."""
    error = raised(errors.fail_until, str(tmp_path), 9, restarts=1)
    assert (type(error), str(error)) == (cases.Broken, "attempt (code 1)")
    assert len(os.listdir(tmp_path)) == 2


# The user's screen takes nothing --------------------------------------------------------------------------------------


STUCK = """
import sys
import torchcrew
from tests.launcher import failure_errors as errors

if __name__ == "__main__":
    torchcrew.launch(errors.be_obstinate, sys.argv[1], "prints", "raises", nprocs=2)
"""


@contextlib.contextmanager
def _stuck_program(tmp_path: Path) -> Iterator[Any]:
    from tests.crew.programs import running

    root = Path(__file__).parents[2]
    (tmp_path / "notes").mkdir()
    code = STUCK.replace("sys.argv[1]", repr(str(tmp_path / "notes")))
    path = {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    with running(code, path=tmp_path / "program.py", env=path) as program:
        yield program


def test_a_full_screen_does_not_keep_ranks_alive(tmp_path: Path) -> None:
    """The launcher's output is a pipe that nobody reads, and full: a failure ends all ranks nevertheless."""
    with _stuck_program(tmp_path) as program:
        known, groups = cases.processes(tmp_path / "notes"), cells.ranks_of(tmp_path / "notes")
        program.pids.update(groups)
        failed = cases.wait_for(tmp_path / "notes", "failed")
        cells.wait_until_gone(known, groups, failed)
