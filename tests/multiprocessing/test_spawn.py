"""`spawn` and `start_processes`: stock's behaviour, the first failure complete, and nothing left of any rank."""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as stock

import torchcrew.multiprocessing as mp
from tests.crew.programs import SOURCE, running, survivors
from tests.multiprocessing import spawn_cases as cases
from torchcrew.crew import reports
from torchcrew.crew.reports import Failure, Kind, Report
from torchcrew.errors import CollectiveTimeout, PeerDied

spawn_module = sys.modules["torchcrew.multiprocessing.spawn"]
pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("_zygote_ends")]

METHODS = ("spawn", "fork")


@pytest.fixture(autouse=True)
def _quiet(recwarn: pytest.WarningsRecorder) -> None:
    """Torch's threads in this process make every fork one to be warned of, which is right and not what is tested."""
    import warnings

    warnings.filterwarnings("ignore", "fork of a process with")


def finish(context: mp.ProcessContext, timeout: float | None = 20, **options: Any) -> None:
    """Join until all have ended."""
    while not context.join(timeout, **options):
        pass


def outcomes(which: str, method: str, directory: Path) -> Any:
    """What a program that runs every scenario with one implementation saw."""
    env = {**os.environ, "PYTHONPATH": f"{SOURCE}:{SOURCE.parent}", "TMPDIR": str(directory)}
    program = str(Path(__file__).with_name("spawn_program.py"))
    run = subprocess.run(
        [sys.executable, program, which, method], capture_output=True, env=env, timeout=170, check=True
    )
    return json.loads(run.stdout)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("method", [pytest.param("fork", marks=pytest.mark.faults), "spawn"])
def test_every_end_looks_as_with_stock(method: str, tmp_path: Path) -> None:
    """Types, texts, exit codes, log and processes are those of stock, by fork and by spawn; no file is left."""
    for name in ("stock", "ours"):
        (tmp_path / name).mkdir()
    expected = outcomes("stock", "fork", tmp_path / "stock")
    seen = outcomes("ours", method, tmp_path / "ours")
    if method == "spawn":
        assert seen.pop("at exit")["codes"] == [5, -signal.SIGTERM]  # forked children run no exit handlers
    assert seen == expected
    left = os.listdir(tmp_path / "ours")
    assert [name for name in left if not name.startswith("torchinductor_")] == []  # torch's own, where it trains


@pytest.mark.faults
@pytest.mark.timeout(240)
def test_every_end_looks_as_with_stocks_spawn(tmp_path: Path) -> None:
    """The same against stock's own spawn, which takes a minute."""
    assert outcomes("ours", "spawn", tmp_path) == outcomes("stock", "spawn", tmp_path)


@pytest.mark.parametrize("name", ["spawn", "start_processes", "ProcessContext", "SpawnContext"])
def test_signatures_are_stocks(name: str) -> None:
    """The names of the arguments, their order and their defaults."""

    def parameters(module: Any) -> list[tuple[str, Any, Any]]:
        found = inspect.signature(getattr(module, name)).parameters.values()
        return [(one.name, one.kind, one.default) for one in found]

    assert parameters(spawn_module) == parameters(stock)


def test_classes_are_stocks() -> None:
    """`except` and `isinstance` with stock's names hold."""
    assert spawn_module.ProcessRaisedException is stock.ProcessRaisedException
    assert spawn_module.ProcessExitedException is stock.ProcessExitedException
    assert issubclass(spawn_module.ProcessContext, stock.ProcessContext)
    join = inspect.signature(spawn_module.ProcessContext.join)
    assert list(join.parameters) == list(inspect.signature(stock.ProcessContext.join).parameters)
    with pytest.warns(UserWarning, match="SpawnContext is renamed to ProcessContext since 1.4 release"):
        assert mp.SpawnContext([], []).join()
    error = mp.ProcessExitedException("Oh no!", 1, 1, 1)
    assert str(pickle.loads(pickle.dumps(error))) == "Oh no!"


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver", "zygote"])
def test_every_rank_gets_its_number(method: str) -> None:
    """Each start method; the return value is None."""
    queue = mp.get_context(method).SimpleQueue()
    assert mp.start_processes(cases.return_index, (queue,), 3, start_method=method) is None
    assert sorted(queue.get() for _ in range(3)) == [0, 1, 2]


def test_spawn_warns_of_another_start_method() -> None:
    """It says so at the caller's line, and goes on with spawn."""
    with pytest.warns(FutureWarning, match="only supports start_method=spawn \\(got: fork\\)") as caught:
        mp.spawn(cases.nothing, start_method="fork")
    assert caught[0].filename == __file__


def test_a_wrong_start_method_is_stocks_error() -> None:
    """Before anything is started."""
    with pytest.raises(ValueError, match="cannot find context for 'telepathy'"):
        mp.start_processes(cases.nothing, start_method="telepathy")


def test_no_process_at_all() -> None:
    """As stock, it is over at once."""
    assert mp.spawn(cases.nothing, nprocs=0) is None


def test_a_context_without_waiting() -> None:
    """join(timeout) gives False while some run, True at the end and ever after."""
    context = mp.spawn(cases.sleep, (0.5,), nprocs=2, join=False)
    assert context is not None
    assert isinstance(context, stock.ProcessContext)
    assert context.join(timeout=0) is False
    assert context.join(timeout=-1) is False  # as torch.distributed.elastic polls
    assert len(set(context.pids())) == 2
    finish(context, timeout=20)
    assert context.join() is True
    assert [process.exitcode for process in context.processes] == [0, 0]


@pytest.mark.parametrize("grace_period", [None, 20])
def test_the_grace_period(grace_period: float | None, caplog: pytest.LogCaptureFixture) -> None:
    """With one, the others may end by themselves; without, they get SIGTERM, which the log says."""
    context = mp.spawn(cases.first_ends, ("exit 3", 1.0), nprocs=2, join=False)
    assert context is not None
    with pytest.raises(mp.ProcessExitedException, match=r"process 0 terminated with exit code 3$"):
        finish(context, grace_period=grace_period)
    assert [process.exitcode for process in context.processes] == [3, 0 if grace_period else -signal.SIGTERM]
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert lines == ([] if grace_period else [f"Terminating process {context.pids()[1]} via signal SIGTERM"])


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_rank_that_takes_no_sigterm_is_killed(
    method: str, native: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Be it that it ignores the signal, or that native code never lets Python's handler run."""
    arguments = (str(tmp_path / "ready"), native)
    context = mp.start_processes(cases.ignore_sigterm, arguments, 2, join=False, start_method=method)
    assert context is not None
    with pytest.raises(mp.ProcessRaisedException, match="on purpose"):
        finish(context, grace_period=0.3)
    assert context.processes[1].exitcode == -signal.SIGKILL
    assert "forcefully exiting via SIGKILL" in caplog.records[-1].getMessage()


def test_a_stopped_rank_is_killed() -> None:
    """SIGTERM waits for a process that somebody stopped; SIGKILL does not."""
    context = mp.spawn(cases.first_ends, ("raise", 60.0), nprocs=2, join=False)
    assert context is not None
    os.kill(context.pids()[1], signal.SIGSTOP)
    with pytest.raises(mp.ProcessRaisedException):
        finish(context, grace_period=0.2)
    assert context.processes[1].exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("raise", 1, "ValueError: on purpose"),
        ("exit 3", 3, None),
        ("_exit 4", 4, None),
        ("SIGKILL", -signal.SIGKILL, None),
        ("SIGTERM", -signal.SIGTERM, None),
    ],
)
def test_an_end_while_the_arguments_are_unpickled(how: str, code: int, text: str | None) -> None:
    """Stock's error and text; for an exception, its traceback too, which stock only writes to stderr."""
    with pytest.raises(mp.ProcessExitedException) as caught:
        mp.spawn(cases.nothing, (cases.UnpicklableThere(how),), nprocs=2)
    assert caught.value.exit_code == code
    lines = str(caught.value).splitlines()
    name = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    assert lines[0] == f"process {caught.value.error_index} terminated with {name}"
    assert lines[-1] == (text or lines[0])


def test_what_cannot_be_pickled_fails_here() -> None:
    """As with stock; a rank that was started before is ended, which stock leaves running."""
    with pytest.raises(TypeError, match="cannot pickle"):
        mp.spawn(cases.nothing, (threading.Lock(),), nprocs=2)


class SecondTime:
    """Cannot be pickled the second time."""

    times = 0

    def __reduce__(self) -> Any:
        SecondTime.times += 1
        if SecondTime.times == 2:
            raise ValueError("twice")
        return cases.sleep, (0, 60.0)  # the first rank is in here until it is ended


def test_a_failed_start_ends_those_that_run() -> None:
    """The error is the start's, and the leak check finds nothing."""
    SecondTime.times = 0
    with pytest.raises(ValueError, match="twice"):
        mp.spawn(cases.nothing, (SecondTime(),), nprocs=2)


@pytest.mark.parametrize("value", [pytest.param("0", marks=pytest.mark.faults), "1"])
def test_parallel_starts(value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """For forkserver only, and said in the log; ranks keep their places."""
    caplog.set_level(logging.INFO, "torch.multiprocessing.spawn")
    monkeypatch.setenv(mp.ENV_VAR_PARALLEL_START, value)
    queue = mp.get_context("forkserver").SimpleQueue()
    context = mp.start_processes(cases.return_index, (queue,), 4, join=False, start_method="forkserver")
    assert context is not None
    finish(context, 20)
    assert sorted(queue.get() for _ in range(4)) == [0, 1, 2, 3]
    said = [record.getMessage() for record in caplog.records if record.name == "torch.multiprocessing.spawn"]
    assert said == (["Starting processes in parallel."] if value == "1" else [])


def test_daemonic_ranks() -> None:
    """The flag arrives."""
    context = mp.spawn(cases.nothing, daemon=True, join=False)
    assert context is not None
    assert context.processes[0].daemon
    finish(context, 20)


@pytest.mark.parametrize("cause", ["raise", "SIGKILL", "exit 3"])
def test_the_cause_is_told_from_its_consequence(cause: str, tmp_path: Path) -> None:
    """A rank that lost its connection to another one is not the one to be blamed, though it ends first."""
    with pytest.raises((mp.ProcessRaisedException, mp.ProcessExitedException)) as caught:
        mp.spawn(cases.reset_then_cause, (cause, str(tmp_path)), nprocs=2)
    assert caught.value.error_index == 1


def test_a_lost_connection_alone_is_reported() -> None:
    """Where nobody else fails, it is the error."""
    with pytest.raises(mp.ProcessRaisedException, match="ConnectionResetError"):
        mp.spawn(cases.reset_then_cause, ("exit 0", tempfile.gettempdir()), nprocs=1)


def test_of_two_errors_the_earlier_is_raised(tmp_path: Path) -> None:
    """Also if that rank takes longer to end."""
    with pytest.raises(mp.ProcessRaisedException, match="ValueError: first") as caught:
        mp.spawn(cases.both_fail, (str(tmp_path),), nprocs=2)
    assert caught.value.error_index == 1


def test_the_order_of_causes() -> None:
    """By kind, then by time."""
    own = {index: Failure(10 - index, Kind.OWN, "") for index in range(3)}
    lost = Failure(0, Kind.CONSEQUENCE, "")
    assert reports.first({**own}, set()) == 2
    assert reports.first({**own, 3: lost}, set()) == 2
    assert reports.first({3: lost, 4: None}, set()) == 4
    assert reports.first({0: own[0], 4: None}, set()) == 0
    assert reports.first({0: own[0], 4: None}, {4}) == 4


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("gloo/transport"), Kind.OWN),
        (RuntimeError("x"), Kind.OWN),
        (EOFError(), Kind.CONSEQUENCE),
        (RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer"), Kind.CONSEQUENCE),
        (PeerDied("rank 1"), Kind.CONSEQUENCE),
        (CollectiveTimeout("rank 1"), Kind.CONSEQUENCE),
        (RuntimeError("this process group cannot be used any more: PeerDied: rank 1"), Kind.CONSEQUENCE),
    ],
)
def test_what_counts_as_a_consequence(error: Exception, kind: Kind) -> None:
    """What says that a peer is gone, also as the cause of something else."""
    for raised in (error, wrapped(error)):
        report = Report()
        report.write(raised)
        failure = report.read()
        assert failure is not None
        assert failure.kind is kind
        report.close()


def wrapped(error: Exception) -> Exception:
    try:
        raise RuntimeError("training failed") from error
    except RuntimeError as outer:
        return outer


def test_a_torn_report_is_none() -> None:
    """A rank that is killed while it writes has said nothing."""
    report = Report()
    assert report.read() is None
    os.pwrite(report.fd, b"half a traceback", 32)
    assert report.read() is None
    report.close()


def test_stocks_error_files_are_read(tmp_path: Path) -> None:
    """A context that somebody makes of processes of his own has paths for its reports."""
    file = tmp_path / "error"
    process = mp.get_context("spawn").Process(target=cases.end, args=("exit 1",))
    process.start()
    file.write_bytes(pickle.dumps("Traceback: of his own\n"))
    context = mp.ProcessContext([process], [str(file)])
    with pytest.raises(mp.ProcessRaisedException, match=r"-- Process 0 terminated with .*\nTraceback: of his own\n"):
        context.join(20)


def test_contexts_free_what_they_hold() -> None:
    """Reports, sentinels and pidfds of twenty spawns are gone with their contexts."""
    mp.spawn(cases.nothing)
    before = len(os.listdir("/proc/self/fd"))
    context = None
    for _ in range(20):
        context = mp.spawn(cases.nothing, nprocs=2, join=False)
        assert context is not None
        finish(context, 20)
    reference = weakref.ref(context)  # type: ignore[arg-type]
    del context
    gc.collect()
    assert reference() is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_error_keeps_nothing() -> None:
    """Its traceback is no cycle: with the exception goes the context, without the collector's help."""
    mp.spawn(cases.nothing)
    before = len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        for _ in range(5):
            with contextlib.suppress(mp.ProcessExitedException):
                mp.spawn(cases.first_ends, ("exit 1",), nprocs=2)
    finally:
        gc.enable()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("how", "method"),
    [
        pytest.param(how, method, marks=() if method == "spawn" or how == "ddp" else pytest.mark.faults)
        for how in ("to", "to name", "cuda", "cuda ()", "set_device", "ddp", "nccl", "load")
        for method in METHODS
    ],
)
def test_the_lack_of_a_gpu_is_explained(how: str, method: str) -> None:
    """The traceback ends in a sentence that names what to use instead."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(mp.ProcessRaisedException, match=r"\nThis machine has no GPU .*torchcrew\.device\(\)"):
        mp.start_processes(cases.use_gpu, (how,), start_method=method)


def test_an_error_of_another_kind_is_not_explained() -> None:
    """Stock's text, to its last character."""
    with pytest.raises(mp.ProcessRaisedException, match=r"\nValueError: on purpose\n$"):
        mp.spawn(cases.first_ends, ("raise",))


PARENT = """
import json, os, signal, sys, time
import torchcrew.multiprocessing as mp

def rank(index, how):
    if how == "native":
        import ctypes
        ctypes.PyDLL(None).sleep(60)
    if how == "ignoring":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(1)

if __name__ == "__main__":
    how, method = os.environ["HOW"], os.environ["METHOD"]
    context = mp.start_processes(rank, (how,), 3, join=False, start_method=method)
    print(json.dumps(context.pids()), flush=True)
    while not context.join():
        pass
"""


@pytest.mark.parametrize(
    ("how", "method"),
    [
        pytest.param(how, method, marks=() if (how == "native") == (method == "spawn") else pytest.mark.faults)
        for how in ("sleeping", "native", "ignoring")
        for method in METHODS
    ],
)
def test_ranks_die_with_their_caller(how: str, method: str, tmp_path: Path) -> None:
    """SIGKILL of the caller ends every rank within a second or two, wherever it is."""
    with running(PARENT, path=tmp_path / "parent.py", env={"HOW": how, "METHOD": method}) as program:
        pids = program.workers(30)
        time.sleep(0.2)
        program.kill()
        assert survivors(pids, 5) == []


INTERRUPTED = """
import json, os, signal, sys, time
import torchcrew.multiprocessing as mp

def rank(index, directory):
    try:
        open(f"{directory}/{index}", "w").close()
        time.sleep(60)
    except KeyboardInterrupt:
        open(f"{directory}/{index} interrupted", "w").close()
        raise

if __name__ == "__main__":
    try:
        mp.spawn(rank, (sys.argv[1],), 2)
    finally:
        import multiprocessing
        print(json.dumps(len(multiprocessing.active_children())), flush=True)
"""


def test_ctrl_c_ends_caller_and_ranks(tmp_path: Path) -> None:
    """The terminal signals all of the group: ranks see a KeyboardInterrupt, the caller raises one, and none is left."""
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 30
        while not ((tmp_path / "0").exists() and (tmp_path / "1").exists()) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        out, error = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait(5)
    assert out == b"0\n"
    assert process.returncode == -signal.SIGINT
    assert error.count(b"Traceback") == 1, error.decode()
    assert {"0 interrupted", "1 interrupted"} <= set(os.listdir(tmp_path))


def test_a_missing_main_guard_is_stocks_message(tmp_path: Path) -> None:
    """Each rank meets it where it imports the script."""
    script = tmp_path / "script.py"
    script.write_text("import torchcrew.multiprocessing as mp\ndef f(i): pass\nmp.spawn(f, nprocs=1)\n")
    run = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        check=False,
    )
    assert run.returncode == 1
    assert "if __name__ == '__main__':" in run.stderr
    assert "process 0 terminated with exit code 1" in run.stderr.splitlines()[-1]
