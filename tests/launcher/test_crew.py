"""Crews: ranks that stay, what they keep, and how they end."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchcrew
from tests.crew.programs import SOURCE, survivors
from tests.launcher import launch_cases as cases
from torchcrew.crew import zygote
from torchcrew.errors import RankDied, RankFailed
from torchcrew.launcher.link import Link
from torchcrew.launcher.team import Team

pytestmark = pytest.mark.timeout(60)
PROGRAMS = Path(__file__).with_name("programs")


@pytest.fixture(scope="module", autouse=True)
def _zygote_ends() -> Iterator[None]:
    yield
    zygote.stop()


def program(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one of the programs to its end."""
    return subprocess.run(
        [sys.executable, str(PROGRAMS / name), *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(SOURCE), str(SOURCE.parent)))},
        check=False,
    )


# What stays -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["zygote", "spawn", "fork", pytest.param("forkserver", marks=pytest.mark.faults)])
def test_the_same_ranks(method: Any) -> None:
    """The same processes for each run, by every start method; all of them have ended when it is closed."""
    with torchcrew.Crew(2, start_method=method) as crew:
        assert crew.pids == ()
        pids = crew.run(cases.pid)
        assert len(set(pids)) == 2
        assert os.getpid() not in pids
        assert crew.pids == tuple(pids)
        assert crew.run(cases.pid) == pids
        assert crew.run(cases.all_reduce_sum) == [2.0, 2.0]
    assert survivors(pids, 0) == []
    assert crew.pids == ()


def test_globals_of_modules_stay() -> None:
    """What a function leaves in a global variable, each rank for itself."""
    with torchcrew.Crew(2) as crew:
        assert crew.run(cases.remember, 1) == [[1], [1]]
        assert crew.run(cases.remember, 2) == [[1, 2], [1, 2]]
    assert cases.remembered == []
    with torchcrew.Crew(2) as other:
        assert other.run(cases.remember, 3) == [[3], [3]]


def test_local_stays() -> None:
    """`crew.local`, when the crew is given as an argument, and when a closure refers to it."""
    with torchcrew.Crew(2) as crew:
        assert crew.run(cases.count_in_local, crew) == [1, 1]

        def count() -> Any:
            crew.local.count += torchcrew.rank()
            return crew.local.count

        assert crew.run(count) == [1, 2]
        assert crew.run(lambda: crew.local.count) == [1, 2]
        assert crew.run(cases.count_in_local, crew=crew) == [2, 3]


def test_local_is_the_ranks() -> None:
    """Here it has nothing, and says where to use it; a crew goes to its own ranks only."""
    with torchcrew.Crew(1) as crew:
        with pytest.raises(AttributeError, match="a namespace of each rank"):
            _ = crew.local
        with pytest.raises(TypeError, match="cannot send its crew"):
            crew.run(cases.the_same, crew)


def test_a_shared_tensor_stays_shared() -> None:
    """One that a rank has made: both sides write to the same memory from then on."""
    with torchcrew.Crew(2) as crew:
        tensors = crew.run(cases.keep_shared, crew)
        for rank, tensor in enumerate(tensors):
            tensor.fill_(rank + 1)
        assert crew.run(cases.read_shared, crew) == [[1.0] * 4, [2.0] * 4]
        del tensors, tensor


def test_values_outlive_the_crew() -> None:
    """What came back belongs to this process."""
    with torchcrew.Crew(2) as crew:
        values = crew.run(cases.a_large_one, 300_000)
    gc.collect()
    assert [float(value.sum()) for value in values] == [0.0, 300_000.0]
    values[0].fill_(3)
    assert float(values[1].sum()) == 300_000.0


def test_a_run_forgets_its_arguments() -> None:
    """Neither side holds them until the next run."""
    with torchcrew.Crew(1) as crew:
        value = torch.zeros(4).share_memory_()
        count = crew.run(cases.descriptors)[0]
        crew.run(cases.nothing, value)
        assert crew.run(cases.descriptors)[0] == count


# The process group ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", [(), (0,), (1,)])
def test_a_group_that_was_destroyed_is_made_again(who: tuple[int, ...]) -> None:
    """By all ranks, or by one of them only: the next run has one."""
    with torchcrew.Crew(2) as crew:
        crew.run(cases.destroy, *who)
        assert crew.run(cases.all_reduce_sum) == [2.0, 2.0]
        assert crew.run(cases.all_reduce_sum) == [2.0, 2.0]


def test_torchruns_way_again_and_again() -> None:
    """Functions that make a group and destroy it at the end."""
    with torchcrew.Crew(2) as crew:
        for init in ("env", "by name", "nothing"):
            assert crew.run(cases.torchrun_style, init) == [(0, 2, 2.0), (1, 2, 2.0)]


def test_work_that_was_left_pending() -> None:
    """A collective that nobody waited for is over sooner or later; the next one is right."""
    with torchcrew.Crew(2) as crew:
        for _ in range(5):
            crew.run(cases.pending_work)
        assert crew.run(cases.all_reduce_sum) == [2.0, 2.0]


def test_work_that_never_ends_does_not_keep_a_crew() -> None:
    """A receive whose message will not come."""
    with torchcrew.Crew(2) as crew:
        pids = crew.run(cases.pid)
        crew.run(cases.pending_forever)
    assert survivors(pids, 0) == []


def test_without_a_group() -> None:
    """`backend=None`: torch has none, and is not asked to make one, run after run."""
    with torchcrew.Crew(2, backend=None) as crew:
        for _ in range(2):
            assert crew.run(lambda: torch.distributed.is_initialized()) == [False, False]
        assert crew.run(cases.torchrun_style, "env") == [(0, 2, 2.0), (1, 2, 2.0)]
        assert crew.run(lambda: torch.distributed.is_initialized()) == [False, False]


# Failures -------------------------------------------------------------------------------------------------------------


def test_after_a_failure_others_are_started() -> None:
    """The old ones have ended, and what they knew is gone."""
    with torchcrew.Crew(2) as crew:
        pids = crew.run(cases.pid)
        crew.run(cases.remember, 1)
        with pytest.raises(KeyError, match="lost") as caught:
            crew.run(cases.fail, 1, KeyError("lost"))
        assert isinstance(caught.value.__cause__, RankFailed)
        assert caught.value.__cause__.rank == 1
        assert caught.value.__cause__.pid == pids[1]
        assert crew.pids == ()
        assert survivors(pids, 0) == []
        assert crew.run(cases.remember, 2) == [[2], [2]]
        assert not set(crew.pids) & set(pids)


def test_a_rank_that_died_between_two_runs() -> None:
    """The next run says so, and the one after that has new ranks."""
    with torchcrew.Crew(2) as crew:
        pids = crew.run(cases.pid)
        os.kill(pids[1], signal.SIGKILL)
        assert survivors(pids[1:], 5) == []
        with pytest.raises(RankDied, match=r"rank 1 .* SIGKILL"):
            crew.run(cases.nothing)
        assert survivors(pids, 0) == []
        assert crew.run(cases.all_reduce_sum) == [2.0, 2.0]


def test_what_cannot_be_sent_runs_nothing() -> None:
    """And the ranks stay as they are."""
    with torchcrew.Crew(2) as crew:
        pids = crew.run(cases.pid)
        with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock' object"):
            crew.run(cases.nothing, threading.Lock())
        with pytest.raises(TypeError, match="cannot pickle 'generator' object"):
            crew.run(cases.nothing, cases.generator())
        assert crew.run(cases.pid) == pids


def test_a_message_that_one_rank_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel refuses descriptors when too many are on their way: an error, and no rank that waits for ever."""
    sent: list[Link] = []

    def send(link: Link, packed: Any) -> None:
        sent.append(link)
        if len(sent) == 2:
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        stock(link, packed)

    with torchcrew.Crew(2, backend=None) as crew:
        crew.run(cases.pid)
        stock = Link.send
        monkeypatch.setattr(Link, "send", send)
        with pytest.raises(OSError, match=os.strerror(errno.ETOOMANYREFS)):
            crew.run(cases.pid)
        assert crew.pids == ()


def test_a_function_that_is_none() -> None:
    """Refused here, before any rank is started for it."""
    with torchcrew.Crew(2) as crew, pytest.raises(TypeError, match=r"fn should be .*callable"):
        crew.run(3)  # type: ignore[arg-type]


# Ends -----------------------------------------------------------------------------------------------------------------


def test_a_closed_crew_says_so() -> None:
    """`close` may be called again, and before any run."""
    crew = torchcrew.Crew(2)
    crew.close()
    crew.close()
    with pytest.raises(RuntimeError, match="this crew is closed"):
        crew.run(cases.nothing)


def test_a_forgotten_crew_ends_its_ranks() -> None:
    """With its last reference, and without anything left."""
    pids = _pids_of_a_forgotten_crew()
    gc.collect()
    assert survivors(pids, 0) == []


def _pids_of_a_forgotten_crew() -> list[int]:
    crew = torchcrew.Crew(2)
    crew.run(lambda: crew.local)  # a function that refers to it
    return crew.run(cases.pid)


def test_descriptors_do_not_grow() -> None:
    """Fifty runs with tensors either way, here and in the ranks."""
    with torchcrew.Crew(2) as crew:
        shared = torch.zeros(3).share_memory_()

        def counts() -> list[int]:
            gc.collect()
            return [len(os.listdir("/proc/self/fd")), *crew.run(cases.descriptors)]

        crew.run(cases.echo, shared, torch.zeros(100_000), value=torch.zeros(10))
        before = counts()
        for _ in range(50):
            crew.run(cases.echo, shared, torch.zeros(100_000), value=torch.zeros(10))
        assert counts() == before


def test_descriptors_of_a_crew(tmp_path: Path) -> None:
    """As many as the documentation says."""

    def count(ranks: int, logs: Path | None = None) -> int:
        with torchcrew.Crew(ranks, logs=logs) as crew:
            crew.run(cases.nothing)
            return len(os.listdir("/proc/self/fd"))

    count(1)  # the guardian, the zygote
    gc.collect()
    none = len(os.listdir("/proc/self/fd"))
    assert count(2) - none == 2 * 7 + 2
    assert count(4) - none == 4 * 7 + 2
    assert count(3, tmp_path) - none == 3 * 5 + 2


def test_no_thread_in_this_process() -> None:
    """While ranks run, too: everything is done by who calls."""
    seen: list[int] = []
    before = len(os.listdir("/proc/self/task"))
    with torchcrew.Crew(2) as crew:
        crew.run(cases.nothing)
        seen.append(len(os.listdir("/proc/self/task")))
        seen += crew.run(lambda pid: len(os.listdir(f"/proc/{pid}/task")), os.getpid())
    assert max(seen) <= before


def test_one_run_at_a_time(tmp_path: Path) -> None:
    """A second thread is told so, and the first is not disturbed."""
    path = tmp_path / "go on"
    values: list[Any] = []
    with torchcrew.Crew(2) as crew:
        crew.run(cases.nothing)
        thread = threading.Thread(target=lambda: values.extend(crew.run(cases.wait_for, str(path))))
        thread.start()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                crew.run(cases.nothing)
            except RuntimeError as error:
                assert "another run of this crew has not returned yet" in str(error)  # noqa: PT017
                break
        path.touch()
        thread.join(20)
        assert values == ["seen", "seen"]
        assert len(crew.run(cases.who)) == 2


def test_one_run_within_another_of_the_same_thread() -> None:
    """As from a signal's handler: an error, not a deadlock."""
    caught: list[str] = []

    def handler(*_: object) -> None:
        try:
            crew.run(cases.nothing)
        except RuntimeError as error:
            caught.append(str(error))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with torchcrew.Crew(1) as crew:
            crew.run(lambda pid: os.kill(pid, signal.SIGUSR1), os.getpid())
            assert crew.run(cases.who) == [(0, 0, 1)]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert caught == ["another run of this crew has not returned yet"]


def test_closed_while_another_thread_runs_it(tmp_path: Path) -> None:
    """The ranks end, and the run says why."""
    errors: list[BaseException] = []
    crew = torchcrew.Crew(2)
    pids = crew.run(cases.pid)

    def run() -> None:
        try:
            crew.run(cases.wait_for, str(tmp_path / "never"))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while not crew._lock.locked():
        time.sleep(0.01)
    crew.close()
    thread.join(20)
    assert not thread.is_alive()
    assert survivors(pids, 0) == []
    assert [type(error) for error in errors] == [RuntimeError]
    assert "closed" in str(errors[0])


def test_closed_by_another_thread_while_its_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank is left, which the end of the program would wait for."""

    def start(team: Team, *args: Any) -> None:
        closing = threading.Thread(target=crew.close)
        closing.start()
        closing.join(10)
        stock(team, *args)

    crew = torchcrew.Crew(2, backend=None)
    stock = Team._start_all
    monkeypatch.setattr(Team, "_start_all", start)
    with pytest.raises(RuntimeError, match="closed"):
        crew.run(cases.pid)
    assert crew.pids == ()


def test_made_and_used_in_a_thread() -> None:
    """Which ends before the crew does."""
    crews: list[torchcrew.Crew] = []
    values: list[Any] = []

    def work() -> None:
        crews.append(torchcrew.Crew(2))
        values.extend(crews[0].run(cases.all_reduce_sum))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert values == [2.0, 2.0]
    assert crews[0].run(cases.all_reduce_sum) == [2.0, 2.0]
    crews[0].close()


def test_two_at_once() -> None:
    """Each has its own ranks and group; also at the same moment."""
    with torchcrew.Crew(2) as one, torchcrew.Crew(3, backend="gloo") as other:
        values: list[Any] = []
        thread = threading.Thread(target=lambda: values.extend(other.run(cases.all_reduce_sum)))
        thread.start()
        assert one.run(cases.all_reduce_sum) == [2.0, 2.0]
        thread.join(30)
        assert values == [3.0] * 3
        assert not set(one.pids) & set(other.pids)


def test_closed_in_any_order() -> None:
    """The first that was made goes first, and the others go on."""
    crews = [torchcrew.Crew(1) for _ in range(3)]
    for crew in crews:
        crew.run(cases.nothing)
    while crews:
        crews.pop(0).close()
        for crew in crews:
            assert crew.run(cases.who) == [(0, 0, 1)]


# Forks ----------------------------------------------------------------------------------------------------------------


def _in_a_fork(work: Any) -> str:
    """What it returns in a forked child of this process."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, str(work()).encode())
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        text = file.read().decode()
    os.waitpid(pid, 0)
    return text


def test_a_fork_leaves_the_ranks_alone() -> None:
    """Running is refused there, closing and forgetting do nothing."""
    with torchcrew.Crew(2) as crew:
        pids = crew.run(cases.pid)
        assert "is one of process" in _in_a_fork(lambda: crew.run(cases.pid))
        assert _in_a_fork(crew.close) == "None"
        assert _in_a_fork(lambda: crew.__exit__(None, None, None)) == "None"
        assert crew.run(cases.pid) == pids


@pytest.mark.faults  # the next one shows it by a child of multiprocessing
def test_a_fork_may_have_its_own() -> None:
    """While the other process has one."""
    with torchcrew.Crew(2) as crew:
        pids = crew.run(cases.pid)

        def own() -> Any:
            with torchcrew.Crew(2) as mine:
                assert not set(mine.run(cases.pid)) & set(pids)
                return mine.run(cases.all_reduce_sum)

        assert _in_a_fork(own) == "[2.0, 2.0]"
        assert crew.run(cases.pid) == pids


def _child(crew: torchcrew.Crew, queue: Any) -> None:
    try:
        crew.run(cases.pid)
    except RuntimeError as error:
        queue.put(str(error))
    del crew
    gc.collect()
    queue.put(torchcrew.launch(cases.who, nprocs=1))


def test_a_forked_process_of_multiprocessing() -> None:
    """Which forgets all finalizers when it begins."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    with torchcrew.Crew(2) as crew:
        pids = crew.run(cases.pid)
        process = context.Process(target=_child, args=(crew, queue))
        process.start()
        assert "is one of process" in queue.get()
        assert queue.get() == [(0, 0, 1)]
        process.join(20)
        process.close()
        assert crew.run(cases.pid) == pids
    queue.close()


# Programs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    ["open", *(pytest.param(h, marks=pytest.mark.faults) for h in ("error", "exit", "thread", "forgotten in a cycle"))],
)
def test_a_program_that_ends_with_an_open_crew(how: str) -> None:
    """It ends at once, with its own exit code, and so do its ranks."""
    result = program("api_open_crew.py", how)
    lines = result.stdout.split()
    assert len(lines) >= 2, result.stderr
    assert survivors(map(int, lines[:2]), 1) == []
    assert result.returncode == {"error": 1, "exit": 3}.get(how, 0), result.stderr
    assert ("ZeroDivisionError" in result.stderr) is (how == "error")
    if how == "thread":
        assert "RankDied" not in result.stderr  # a daemon's own error may be cut short by the end
    elif how != "error":
        assert result.stderr == ""


@pytest.mark.faults
def test_a_program_that_is_interrupted_between_two_runs() -> None:
    """Ctrl-C while ranks wait: one traceback, no rank left."""
    result = program("api_open_crew.py", "interrupt")
    assert survivors(map(int, result.stdout.split()[:2]), 1) == []
    assert result.returncode in (-signal.SIGINT, 130), result.stderr
    assert result.stderr.count("Traceback") == 1
