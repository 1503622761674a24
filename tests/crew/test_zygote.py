"""The start method "zygote": spawn's semantics, in milliseconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.crew import zygote_cases as cases
from tests.crew.programs import descriptor_counts, run, state
from torchcrew.crew import guardian, zygote

pytestmark = pytest.mark.timeout(60)


@contextlib.contextmanager
def changed_situation(directory: Path) -> Iterator[None]:
    """Change everything a spawned process would take over, and put it back."""
    cores, cwd, argv, path = os.sched_getaffinity(0), os.getcwd(), sys.argv, sys.path
    limits = {number: resource.getrlimit(number) for number in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)}
    umask, handler = os.umask(0o37), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.environ["TORCHCREW_TEST"] = "1"
    home = os.environ.pop("HOME", None)
    threads = os.environ.pop("OMP_NUM_THREADS", None)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        os.sched_setaffinity(0, {min(cores)})
        os.chdir(directory)
        sys.argv, sys.path = ["a", "b"], [*path, "/nowhere"]
        for number, (_, hard) in limits.items():
            resource.setrlimit(number, (min(hard, 900) if hard >= 0 else 900, hard))
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
        for number, limit in limits.items():
            resource.setrlimit(number, limit)
        sys.argv, sys.path = argv, path
        os.chdir(cwd)
        os.sched_setaffinity(0, cores)
        os.umask(umask)
        signal.signal(signal.SIGHUP, handler)
        del os.environ["TORCHCREW_TEST"]
        del os.environ["OMP_NUM_THREADS"]
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = threads
        if home is not None:
            os.environ["HOME"] = home


def reported(ctx: Any, *, daemon: bool = False) -> dict[str, Any]:
    queue = ctx.SimpleQueue()
    process = ctx.Process(target=cases.report, args=(queue,), name="a name", daemon=daemon)
    process.start()
    assert queue._reader.poll(20)
    found: dict[str, Any] = queue.get()
    process.join(20)
    assert process.exitcode == 0
    return found


@pytest.mark.parametrize("changed", [pytest.param(False, marks=pytest.mark.faults), True])
def test_a_process_sees_what_a_spawned_one_sees(ctx: Any, tmp_path: Path, changed: bool) -> None:
    """Every inherited thing is the parent's of this moment, also when that differs from the zygote's own start."""
    spawn = multiprocessing.get_context("spawn")
    run(ctx.Process(target=cases.nothing))
    with changed_situation(tmp_path) if changed else contextlib.nullcontext():
        ours, stock = (reported(context, daemon=not changed) for context in (ctx, spawn))
        environments = ours.pop("environment"), stock.pop("environment")
        assert set(environments[0].items()) ^ set(environments[1].items()) == set()
        assert ours == stock


@pytest.mark.parametrize(
    "how",
    [
        "return",
        "0",
        "3",
        "255",
        "256",
        "-1",
        "None",
        "text",
        "raise",
        "_exit",
        "SIGKILL",
        "SIGTERM",
        "SIGINT",
        "SIGSEGV",
    ],
)
def test_exit_codes_are_spawns(ctx: Any, how: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Whichever way a process ends, code and output are those of a spawned one."""
    limit = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, limit[1]))
    try:
        seen = []
        for context in (ctx, multiprocessing.get_context("spawn")):
            code = run(context.Process(target=cases.exit_by, args=(how,), name="p"))
            error = capfd.readouterr().err
            seen.append((code, error.splitlines()[:1], error.splitlines()[-1:]))
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, limit)
    assert seen[0] == seen[1]


def test_the_context_says_its_name(ctx: Any) -> None:
    """It is a context like stock's."""
    assert ctx.get_start_method() == "zygote"
    assert isinstance(ctx.Process(target=cases.nothing), zygote.ZygoteProcess)


def test_a_process_object_behaves(ctx: Any) -> None:
    """Pid, sentinel, is_alive, terminate, kill, join, close as with stock's processes."""
    process = ctx.Process(target=time.sleep, args=(60,))
    assert process.exitcode is None
    assert process.pid is None
    process.start()
    assert process.is_alive()
    assert state(process.pid)
    assert process in multiprocessing.active_children()
    assert connection.wait([process.sentinel], 0.05) == []
    with pytest.raises(ValueError, match="still running"):
        process.close()
    process.join(0.01)
    assert process.exitcode is None
    process.terminate()
    assert connection.wait([process.sentinel], 10) == [process.sentinel]
    process.join(10)
    assert process.exitcode == -signal.SIGTERM
    process.kill()
    process.close()
    with pytest.raises(ValueError, match="closed"):
        process.is_alive()


def test_signals_sent_before_it_runs_are_not_lost(ctx: Any) -> None:
    """terminate right after start ends the process."""
    process = ctx.Process(target=time.sleep, args=(60,))
    process.start()
    process.terminate()
    process.join(10)
    assert process.exitcode == -signal.SIGTERM


def test_the_primitives_of_the_context(ctx: Any) -> None:
    """Locks and the rest travel as with spawn, by name, and are unlinked at the end."""
    before = set(os.listdir("/dev/shm"))
    lock, event, semaphore, condition = ctx.Lock(), ctx.Event(), ctx.Semaphore(0), ctx.Condition()
    barrier, value, array = ctx.Barrier(3), ctx.Value("i", 0), ctx.Array("i", 2)
    arguments = (lock, event, semaphore, condition, barrier, value, array)
    processes = [ctx.Process(target=cases.use_primitives, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    barrier.wait(20)
    assert event.wait(20)
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
    assert semaphore.acquire(timeout=5)
    assert semaphore.acquire(timeout=5)
    assert value.value == 2
    assert array[0] == 7
    del lock, event, semaphore, condition, barrier, value, array, arguments, processes, process
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.parametrize("kind", ["connection", "socket", "tensor", "many descriptors", "large"])
def test_what_travels_with_a_process(ctx: Any, kind: str) -> None:
    """Descriptors and large arguments arrive, as `reduction.DupFd` and pickle promise."""
    ours, theirs = ctx.Pipe()
    expected: Any = b"hello"
    with contextlib.ExitStack() as stack:
        stack.callback(ours.close)
        stack.callback(theirs.close)
        if kind == "connection":
            near, held = ctx.Pipe()
            near.send(b"hello")
            stack.callback(near.close)
            stack.callback(held.close)
        elif kind == "socket":
            near, held = socket.socketpair()
            stack.enter_context(near)
            stack.enter_context(held)
            near.send(b"hello")
        elif kind == "many descriptors":
            held = []
            for number in range(300):
                near, far = ctx.Pipe(duplex=False)
                stack.callback(near.close)
                stack.callback(far.close)
                held.append(near if number else theirs)
        elif kind == "large":
            held = expected = os.urandom(1 << 20) * 40
        else:
            held = torch.arange(1000).share_memory_()
            expected = held.tolist()
        process = ctx.Process(target=cases.echo, args=(theirs, held if kind != "many descriptors" else len(held)))
        if kind == "many descriptors":
            process = ctx.Process(target=cases.nothing, args=(held,))
        process.start()
        if kind != "many descriptors":
            assert ours.poll(20)
            assert ours.recv() == expected
        process.join(20)
        assert process.exitcode == 0
        if kind == "tensor":
            assert held[0] == -1  # shared, not copied


def test_processes_draw_different_random_numbers_as_spawned_ones_do(ctx: Any) -> None:
    """Python's, numpy's and torch's generators start anew in each, as in a fresh interpreter."""
    queue = ctx.SimpleQueue()
    draws = []
    for _ in range(2):
        process = ctx.Process(target=cases.random_numbers, args=(queue,))
        process.start()
        draws.append(queue.get())
        process.join(20)
    first, second = draws
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert first[2] != second[2]


def test_thread_pools_work_in_children(ctx: Any) -> None:
    """The pools have the size of a fresh process's, and do not hang after the fork."""
    queues = [ctx.SimpleQueue() for _ in range(3)]
    processes = [ctx.Process(target=cases.matmul, args=(queue,)) for queue in queues]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
    assert {queue.get() for queue in queues} == {torch.get_num_threads()}


def test_an_unpicklable_process_fails_in_the_parent(ctx: Any) -> None:
    """As with spawn, before anything was started."""
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Exception, match=r"[Pp]ickl|local"):
        ctx.Process(target=lambda: None).start()
    assert len(os.listdir("/proc/self/fd")) == fds


@pytest.mark.parametrize("own", [True, False])
def test_the_process_group(ctx: Any, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own, or the user's, whose Ctrl-C it gets then; SIGKILL and the exit code are the same."""
    monkeypatch.setattr(zygote.Popen, "own_group", own)
    process = ctx.Process(target=time.sleep, args=(60,))
    process.start()
    assert os.getpgid(process.pid) == (process.pid if own else os.getpgrp())
    process.kill()
    process.join(20)
    assert process.exitcode == -signal.SIGKILL


def test_a_process_group_that_cannot_be_joined(ctx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of another session, as of a user who became a daemon since: it has its own then."""
    run(ctx.Process(target=cases.nothing))
    monkeypatch.setattr(zygote.Popen, "own_group", False)
    monkeypatch.setattr(os, "getpgrp", lambda: os.getpgid(guardian.pid() or 0))
    process = ctx.Process(target=time.sleep, args=(60,))
    process.start()
    assert os.getpgid(process.pid) == process.pid
    process.kill()
    process.join(20)
    assert process.exitcode == -signal.SIGKILL


def test_a_process_started_so_starts_others(ctx: Any) -> None:
    """The default method in a child is its own, works, and lets stock's spawn work."""
    queue = ctx.Queue()
    process = ctx.Process(target=cases.start_another, args=(queue,))
    process.start()
    assert queue.get(timeout=40) == "zygote"
    assert queue.get(timeout=40) == (0, 0)
    process.join(20)
    assert process.exitcode == 0
    queue.close()
    queue.join_thread()


def test_starts_leak_nothing(ctx: Any) -> None:
    """Fifty starts leave the descriptors of all processes as they were."""
    run(ctx.Process(target=cases.nothing))
    run(ctx.Process(target=cases.nothing))

    pids = [os.getpid(), guardian.pid() or 0, *zygote.pids()]
    before = descriptor_counts(pids)
    for _ in range(50):
        assert run(ctx.Process(target=cases.nothing)) == 0
    assert descriptor_counts(pids) == before


def test_a_warm_start_is_quick(ctx: Any) -> None:
    """From start to the running function in well under the time of an import of torch."""
    queue = ctx.SimpleQueue()
    times = []
    for _ in range(10):
        begun = time.monotonic()
        process = ctx.Process(target=cases.put, args=(queue, None))
        process.start()
        queue.get()
        times.append(time.monotonic() - begun)
        process.join(20)
    assert sorted(times)[5] < 0.15  # measured: 0.01; the bound is for a loaded machine


def test_starts_from_many_threads(ctx: Any) -> None:
    """The zygote serves one after the other, and each process is its starter's."""
    codes: list[int | None] = []
    threads = [
        threading.Thread(target=lambda n=n: codes.append(run(ctx.Process(target=cases.exit_by, args=(str(n),)))))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(codes) == list(range(8))  # type: ignore[type-var]
