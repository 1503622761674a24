"""Processes that die with a queue in their hands: nobody waits for ever, nothing is half, and no false alarm."""

from __future__ import annotations

import json
import os
import queue as stdlib_queue
import signal
import threading
import time
import warnings
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any

import pytest
import torch

import torchcrew.multiprocessing as mp
from tests.memory.test_kill_every_syscall import why_not
from tests.multiprocessing import queue_cases as cases
from torchcrew.errors import PeerDied
from torchcrew.testing.crash import run_program

PROGRAMS = Path(__file__).parent / "programs"
ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parent.parent.parent)}
KINDS = ("Queue", "JoinableQueue", "SimpleQueue")
METHODS = ("fork", "spawn", "forkserver", "zygote")
FORK: Any = mp.get_context("fork")

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("_zygote_ends")]


def start(target: Any, *args: Any, context: Any = FORK, name: str | None = None) -> Any:
    process = context.Process(target=target, args=args, name=name)
    process.start()
    return process


# Nobody is left -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_get_says_who_died_and_how(method: str, kind: str) -> None:
    """What the dead had put arrives first; then an error names them."""
    context = mp.get_context(method)
    queue = getattr(context, kind)()
    process = start(cases.put_and_die, queue, torch.ones(3), context=context, name="painter")
    assert queue.get().sum() == 3
    for _ in range(2):
        with pytest.raises(PeerDied, match=rf"painter \(pid {process.pid}, killed by SIGKILL\)"):
            queue.get()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("how", [0, 3, -signal.SIGTERM])
def test_get_says_how_they_ended_also_if_they_were_joined(how: int) -> None:
    """The process objects may be gone: what is remembered is enough for name and exit code."""
    queue = FORK.Queue()
    process = start(cases.end, how, queue, name="mason")
    pid = process.pid
    process.join()
    del process
    text = f"exit code {how}" if how >= 0 else "killed by SIGTERM"
    with pytest.raises(PeerDied, match=rf"mason \(pid {pid}, {text}\)"):
        queue.get()


def test_a_stopped_producer_blocks_no_put() -> None:
    """What the others put waits with them until it goes on, as with stock."""
    queue = FORK.Queue()
    process = start(cases.stop_in_put, queue)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    for number in range(3):
        queue.put(number)
    with pytest.raises(stdlib_queue.Empty):
        queue.get(timeout=0.1)
    os.kill(process.pid, signal.SIGCONT)
    assert [queue.get(timeout=10) for _ in range(3)] == [0, 1, 2]
    process.join()
    queue.close()
    queue.join_thread()


def test_a_thread_that_only_serves_others_is_not_waited_for() -> None:
    """As stock's server of descriptors, which runs to the end of the process once something has used it."""
    queue = FORK.Queue()
    start(cases.end, 3, queue, name="mason").join()
    read, write = os.pipe()
    shared = resource_sharer.DupFd(read)
    assert threading.active_count() > 1
    try:
        with pytest.raises(PeerDied, match="mason"):
            queue.get()
    finally:
        os.close(shared.detach())
        resource_sharer.stop(timeout=10)
        os.close(read)
        os.close(write)


def test_an_error_is_as_good_as_a_look() -> None:
    """Who got the error is not told once more at exit."""
    result = run_program(
        "import os, signal\n"
        "import torchcrew.multiprocessing as mp\n"
        "def die(queue): os.kill(os.getpid(), signal.SIGKILL)\n"
        "if __name__ == '__main__':\n"
        "    queue = mp.get_context('fork').Queue()\n"
        "    process = mp.get_context('fork').Process(target=die, args=(queue,))\n"
        "    process.start()\n"
        "    try: queue.get()\n"
        "    except EOFError as error: print(error)\n"
    ).check()
    assert "killed by SIGKILL" in result.stdout
    assert result.stderr == ""


def test_with_a_timeout_it_is_an_empty() -> None:
    """At the timeout, not before, and of the type that says why; `block=False` says nothing."""
    queue = FORK.Queue()
    process = start(cases.end, -signal.SIGKILL, queue)
    process.join()
    started = time.monotonic()
    with pytest.raises(stdlib_queue.Empty) as caught:
        queue.get(timeout=0.2)
    assert time.monotonic() - started >= 0.2
    assert isinstance(caught.value, PeerDied)
    with pytest.raises(stdlib_queue.Empty) as caught:
        queue.get_nowait()
    assert not isinstance(caught.value, PeerDied)


def test_a_put_that_nobody_makes_room_for() -> None:
    """The same at a full queue; with a timeout it is Full."""
    queue = FORK.Queue(1)
    process = start(cases.get_and_die, queue)
    queue.put(1)
    process.join()
    queue.put(2)
    with pytest.raises(stdlib_queue.Full):
        queue.put(3, timeout=0.1)
    with pytest.raises(PeerDied, match="is full, and nobody is left"):
        queue.put(3)
    assert queue.get() == 2


def test_a_full_simple_queue() -> None:
    """Its put waits for room in the socket."""
    queue = FORK.SimpleQueue()
    queue.put(1)
    start(cases.get_and_die, queue).join()
    with pytest.raises(PeerDied, match="is full"):
        cases.put_many(queue)


def test_tasks_that_nobody_is_left_to_do() -> None:
    """`join` ends, too."""
    queue = FORK.JoinableQueue()
    queue.put(1)
    process = start(cases.get_and_die, queue, name="tailor")
    with pytest.raises(PeerDied, match=r"tasks that nobody is left to do.*tailor \(pid \d+, killed by SIGKILL\)"):
        queue.join()
    process.join()


def test_all_of_several() -> None:
    """The error comes with the last one, and names all."""
    queue = FORK.Queue()
    ours, theirs = FORK.Pipe()
    first = start(cases.end, -signal.SIGKILL, queue, name="first")
    second = start(cases.end_when_told, theirs, 0, queue, name="second")
    first.join()
    with pytest.warns(RuntimeWarning, match="first"), pytest.raises(stdlib_queue.Empty):
        queue.get(timeout=0.1)
    ours.send("go")
    with pytest.raises(PeerDied, match=r"first \(.* by SIGKILL\), second \(.*, exit code 0\)"):
        queue.get()
    second.join()
    ours.close()
    theirs.close()


def test_a_grandchild_counts() -> None:
    """As long as anybody lives who has the queue from a dead holder, it may put."""
    queue = FORK.Queue()
    ours, theirs = FORK.Pipe()
    process = start(leave_a_child, queue, theirs)
    process.join()
    ours.send("go")
    assert queue.get() == "late"
    assert ours.recv() == "gone"
    with pytest.raises(PeerDied):
        queue.get()
    ours.close()
    theirs.close()


def leave_a_child(queue: Any, connection: Any) -> None:
    """End before a child does."""
    if os.fork() == 0:
        try:
            connection.recv()
            queue.put("late")
            connection.send("gone")
        finally:
            os._exit(0)


# Others live ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_failed_is_named_once(kind: str) -> None:
    """`get` goes on waiting, and warns; at the caller's line."""
    queue = getattr(FORK, kind)()
    ours, theirs = FORK.Pipe()
    alive = start(cases.live_until_told, theirs, queue)
    died = start(cases.end, -signal.SIGTERM, queue, name="smith")
    died.join()
    timer = threading.Timer(0.3, ours.send, [0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        timer.start()
        with pytest.raises(PeerDied, match=r"smith .*SIGTERM.*exit code 0"):
            queue.get()
    told = [warning for warning in caught if "smith" in str(warning.message)]
    assert len(told) == 1
    assert issubclass(told[0].category, RuntimeWarning)
    assert told[0].filename == __file__
    for process in (alive, died):
        process.join()
    timer.join()
    ours.close()
    theirs.close()


def test_what_is_there_comes_before_the_warning() -> None:
    """A death is told by a `get` that waits, and that may be an exception: no message is lost."""
    queue = FORK.Queue()
    ours, theirs = FORK.Pipe()
    alive = start(cases.live_until_told, theirs, queue)
    died = start(cases.put_and_die, queue, "last words")
    died.join()
    assert died.exitcode == -signal.SIGKILL
    assert queue.get(timeout=5) == "last words"
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(RuntimeWarning, match="SIGKILL"):
            queue.get(timeout=5)
    with pytest.raises(stdlib_queue.Empty):
        queue.get(timeout=0.05)
    ours.send("go")
    alive.join()
    ours.close()
    theirs.close()


# No false alarm -------------------------------------------------------------------------------------------------------


def gets_nothing(queue: Any, seconds: float = 0.4) -> None:
    """Have a thread wait at the queue for so long; it must still be waiting, and get what is put then."""
    outcome: list[Any] = []

    def wait() -> None:
        try:
            outcome.append(queue.get())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(seconds)
    assert not outcome
    queue.put("at last")
    thread.join(10)
    assert outcome == ["at last"]


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_else_ever_held_it(kind: str) -> None:
    """Then it waits, as stock's."""
    queue = getattr(FORK, kind)()
    start(cases.end, 0).join()
    gets_nothing(getattr(FORK, kind)())
    gets_nothing(queue)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("error:.* is gone:RuntimeWarning")
def test_others_ended_well_and_a_thread_may_put(kind: str) -> None:
    """Another thread could."""
    queue = getattr(FORK, kind)()
    start(cases.put_all, queue, [1]).join()
    assert queue.get() == 1
    gets_nothing(queue)


def test_a_thread_that_ends() -> None:
    """When the last other thread is gone, nobody is left."""
    queue = FORK.Queue()
    start(cases.end, 0, queue).join()
    thread = threading.Thread(target=time.sleep, args=(0.4,))
    thread.start()
    with pytest.raises(PeerDied, match="exit code 0"):
        queue.get()
    assert not thread.is_alive()
    thread.join()


def test_a_process_that_a_thread_starts() -> None:
    """One that is started while `get` waits is waited for, and watched."""
    queue = FORK.Queue()
    start(cases.end, 0, queue).join()

    def later() -> None:
        time.sleep(0.2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fork with a thread
            start(cases.put_all, queue, ["late"]).join()

    thread = threading.Thread(target=later)
    thread.start()
    assert queue.get() == "late"
    with pytest.raises(PeerDied):
        queue.get()
    thread.join()


def test_a_new_process_makes_it_usable_again() -> None:
    """After an error, too."""
    queue = FORK.Queue()
    start(cases.end, -signal.SIGKILL, queue).join()
    with pytest.raises(PeerDied):
        queue.get()
    process = start(cases.put_all, queue, ["again"])
    assert queue.get() == "again"
    process.join()


def test_its_own_backlog_is_somebody() -> None:
    """What this process has put and not sent will come."""
    queue = FORK.Queue()
    start(cases.end, 0, queue).join()
    for index in range(cases.MANY):
        queue.put(index)
    assert [queue.get() for _ in range(cases.MANY)] == list(range(cases.MANY))
    queue.close()
    queue.join_thread()


@pytest.mark.parametrize("method", ["spawn", "zygote"])
def test_who_lets_go_of_the_queue_is_no_dead_one(method: str) -> None:
    """A child that forgets the queue, and lives, is not taken for gone."""
    context = mp.get_context(method)
    queue, (ours, theirs) = context.Queue(), context.Pipe()
    process = start(forget, [queue], theirs, context=context)
    assert ours.recv() == "forgotten"
    with pytest.raises(stdlib_queue.Empty) as caught:
        queue.get(timeout=0.1)
    assert not isinstance(caught.value, PeerDied)
    ours.send("go")
    with pytest.raises(PeerDied):
        queue.get()
    process.join()
    ours.close()
    theirs.close()


def forget(holder: list[Any], connection: Any) -> None:
    """Let go of the queue, and live on."""
    holder.pop().close()
    connection.send("forgotten")
    connection.recv()


# Killed anywhere ------------------------------------------------------------------------------------------------------


def kill_at_random(kind: str, kills: int, seed: int, timeout: float) -> dict[str, int]:
    result = run_program(PROGRAMS / "queue_kills.py", kind, str(kills), str(seed), timeout=timeout).check()
    told: dict[str, int] = json.loads(result.stdout)
    assert told["producers"] + told["consumers"] == kills
    assert told["received"] > kills
    return told


def test_random_kills() -> None:
    """Some of each, at random instants."""
    kill_at_random("Queue", 30, 1, 50)


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [*KINDS, "bounded"])
@pytest.mark.parametrize("seed", range(3))
def test_many_random_kills(kind: str, seed: int) -> None:
    """Hundreds."""
    kill_at_random(kind, 200, seed, 200)


@pytest.fixture
def _traceable() -> None:
    if why_not():
        pytest.skip(why_not())


def trials(victim: str, points: list[str], timeout: float) -> list[dict[str, Any]]:
    result = run_program(PROGRAMS / "queue_syscalls.py", victim, *points, timeout=timeout, env=ENVIRONMENT).check()
    found: list[dict[str, Any]] = [json.loads(line) for line in result.stdout.splitlines()]
    assert [trial["point"] for trial in found] == points
    wrong = [trial for trial in found if "error" in trial or trial["victim"] not in (0, -9) or trial["other"]]
    assert not wrong, json.dumps(wrong, indent=2)
    return found


def all_points(victim: str) -> list[str]:
    """One for every system call that the victim makes when it is let be."""
    [trial] = trials(victim, ["count"], 60)
    assert trial["victim"] == 0
    return [f"{name}:{n}" for name, count in sorted(trial["counts"].items()) for n in range(1, count + 1)]


@pytest.mark.usefixtures("_traceable")
@pytest.mark.parametrize("victim", ["producer", pytest.param("consumer", marks=pytest.mark.faults)])
def test_killed_at_some_system_calls(victim: str) -> None:
    """A few of all points, those around the packet among them."""
    points = all_points(victim)
    chosen = points[:: max(1, len(points) // 5)]
    chosen += ["sendmsg:2", "fcntl:4"] if victim == "producer" else ["recvmsg:2"]
    killed = [trial for trial in trials(victim, chosen, 50) if trial["victim"]]
    assert len(killed) >= len(chosen) // 2


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("_traceable")
@pytest.mark.parametrize("victim", ["producer", "consumer"])
def test_killed_at_every_system_call(victim: str) -> None:
    """All of them."""
    points = all_points(victim)
    killed = [trial for trial in trials(victim, points, 800) if trial["victim"]]
    assert len(killed) >= len(points) * 3 // 4
