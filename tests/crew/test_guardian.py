"""The guardian: whatever ends the user's process ends its workers and what they started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.crew.programs import SOURCE, running, state, survivors, wait_for_state

HEAD = """
import ctypes, json, os, signal, subprocess, sys, threading, time
from torchcrew.crew import guardian

def say(value):
    os.write(1, (json.dumps(value) + "\\n").encode())

def worker(body):
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        body(done)
        time.sleep(60)
        os._exit(0)
    guardian.watch(pid)
    os.close(done)
    said = os.read(ready, 100).decode().split()
    os.close(ready)
    return [pid, *map(int, said)]

def asleep(done):
    os.write(done, b" ")

def holding_the_gil(done):
    os.write(done, b" ")
    ctypes.PyDLL(None).sleep(60)

def with_subprocess(done):
    os.write(done, str(subprocess.Popen(["sleep", "60"]).pid).encode())
    time.sleep(60)

def with_shell_pipeline(done):
    child = subprocess.Popen("sleep 60 | sleep 60 & echo $!; sleep 60", shell=True, stdout=subprocess.PIPE)
    os.write(done, str(child.pid).encode() + b" " + child.stdout.readline())
    ctypes.PyDLL(None).sleep(60)
"""

BODIES = ("asleep", "holding_the_gil", "with_subprocess", "with_shell_pipeline")


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("end", ["SIGKILL", "SIGKILL to the group", "SIGTERM", "SIGSEGV", "_exit", "exit"])
def test_workers_end_with_their_user(body: str, end: str) -> None:
    """However the user's process ends, its workers and their subprocesses are gone within a second."""
    code = (
        HEAD
        + f"""
say(worker({body}) + worker(asleep) + [guardian.pid()])
if {end!r} == "exit":
    sys.exit()
if {end!r} == "_exit":
    os._exit(3)
if {end!r} == "SIGSEGV":
    os.kill(os.getpid(), signal.SIGSEGV)
time.sleep(60)
"""
    )
    with running(code) as program:
        pids = program.workers()
        if end == "SIGKILL to the group":
            os.killpg(program.pid, signal.SIGKILL)
        elif end in ("SIGKILL", "SIGTERM"):
            program.kill(getattr(signal, end))
        program.process.wait(5)
        assert survivors(pids, 1.0) == []


def test_a_worker_started_by_a_thread_that_ended_lives_on_and_ends_with_the_user() -> None:
    """The death of the starting thread is not the death of the user (PR_SET_PDEATHSIG takes it for that)."""
    code = (
        HEAD
        + """
found = []
thread = threading.Thread(target=lambda: found.extend(worker(with_subprocess)))
thread.start()
thread.join()
time.sleep(0.3)
say(found + [guardian.pid()])
time.sleep(60)
"""
    )
    with running(code) as program:
        pids = program.workers()
        assert all(state(pid) for pid in pids)
        program.kill()
        assert survivors(pids, 1.0) == []


@pytest.mark.parametrize("body", ["asleep", "holding_the_gil"])
def test_a_stray_fork_that_inherited_every_descriptor_changes_nothing(body: str) -> None:
    """A process that holds copies of all ends hides every end of file; the pidfd is the signal that counts."""
    code = (
        HEAD
        + f"""
found = worker({body})
libc = ctypes.PyDLL(None)
stray = libc.fork()  # past Python's fork hooks: it keeps every descriptor
if stray == 0:
    os.setsid()
    time.sleep(60)
    os._exit(0)
say([stray])
say(found + worker(asleep) + [guardian.pid()])
time.sleep(60)
"""
    )
    with running(code) as program:
        (stray,) = program.workers()
        pids = program.workers()
        program.kill()
        assert survivors(pids, 1.0) == []
        assert state(stray)


def test_a_user_killed_right_after_its_first_watch() -> None:
    """A registration outlives the user even when the guardian was not up to read it."""
    code = (
        HEAD
        + """
pid = os.fork()
if pid == 0:
    time.sleep(60)
    os._exit(0)
say([pid])
guardian.watch(pid)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    for _ in range(5):
        with running(code) as program:
            pids = program.workers()
            program.process.wait(5)
            assert survivors(pids, 1.0) == []


def test_stop_and_continue_reach_the_workers() -> None:
    """Ctrl-Z stops the workers and what they started, fg lets them go on."""
    code = (
        HEAD
        + """
say(worker(with_subprocess) + worker(asleep))
time.sleep(60)
"""
    )
    with running(code) as program:
        pids = program.workers()
        for _ in range(2):
            program.kill(signal.SIGSTOP)
            assert wait_for_state(pids, "T", 2.0)
            program.kill(signal.SIGCONT)
            assert wait_for_state(pids, "SRD", 2.0)
        program.kill(signal.SIGSTOP)
        assert wait_for_state(pids, "T", 2.0)
        program.kill()
        assert survivors(pids, 1.0) == []


def test_a_worker_stopped_on_its_own_stays_stopped() -> None:
    """Only changes of the user's state are passed on."""
    with running(HEAD + "say(worker(asleep))\ntime.sleep(60)\n") as program:
        (pid,) = program.workers()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.7)
        assert state(pid) == "T"


def test_a_forgotten_worker_lives_on() -> None:
    """What was forgotten is not killed, and its pidfd is closed on both sides."""
    code = (
        HEAD
        + """
before = len(os.listdir("/proc/self/fd"))
kept = worker(asleep)
both = [*kept, *worker(asleep)]
theirs = len(os.listdir(f"/proc/{guardian.pid()}/fd"))
guardian.forget(both[0])
guardian.forget(both[0])
guardian.forget(1)
time.sleep(0.1)
say(both)
say([len(os.listdir("/proc/self/fd")) - before])
time.sleep(60)
"""
    )
    with running(code) as program:
        kept, other = program.workers()
        assert program.line() == [4]  # socket and pidfd of the guardian, pidfd of the other worker, stacks
        program.kill()
        assert survivors([other], 1.0) == []
        assert state(kept)


def test_watching_is_shared_by_all_who_watch() -> None:
    """They get the same pidfd, open until all of them have called `forget`; it shows the end. Who is gone is not."""
    code = (
        HEAD
        + """
import select
pid = worker(asleep)[0]
pidfd = guardian.watch(pid)
assert guardian.watch(pid) == pidfd and os.fstat(pidfd)
assert not set(guardian.descriptors()) - {int(fd) for fd in os.listdir("/proc/self/fd")}
assert len(guardian.descriptors()) == 2 and pidfd not in guardian.descriptors()
guardian.forget(pid)
guardian.forget(pid)
assert not select.select([pidfd], [], [], 0)[0]
os.kill(pid, signal.SIGKILL)
assert select.select([pidfd], [], [], 5)[0]
assert guardian.watch(pid) == pidfd, "a zombie is still it"
os.waitpid(pid, 0)
assert guardian.watch(pid) == pidfd, "so is one that is gone, until it is forgotten"
for _ in range(3):
    guardian.forget(pid)
assert not os.path.exists(f"/proc/self/fd/{pidfd}")
assert guardian.watch(pid) is None
say([])
"""
    )
    with running(code) as program:
        program.workers()
        assert program.process.wait(5) == 0


def test_a_dead_guardian_is_replaced_and_told_of_all_workers() -> None:
    """The next watch after a guardian's death protects the earlier workers too and leaves no zombie."""
    code = (
        HEAD
        + """
first = worker(asleep)
old = guardian.pid()
os.kill(old, signal.SIGKILL)
while guardian.pid() is not None:
    time.sleep(0.01)
second = worker(asleep)
assert guardian.pid() not in (None, old)
assert not os.path.exists(f"/proc/{old}"), "a zombie"
say(first + second + [guardian.pid()])
time.sleep(60)
"""
    )
    with running(code) as program:
        pids = program.workers()
        program.kill()
        assert survivors(pids, 1.0) == []


def test_a_stopped_guardian_is_replaced() -> None:
    """A guardian that reads nothing does not make its user wait for ever, and loses no worker."""
    code = (
        HEAD
        + """
first = worker(asleep)
os.kill(guardian.pid(), signal.SIGSTOP)
start = time.monotonic()
for _ in range(2000):
    guardian.watch(first[0])
assert time.monotonic() - start < 8
say(first + [guardian.pid()])
time.sleep(60)
"""
    )
    with running(code) as program:
        pids = program.workers()
        program.kill()
        assert survivors(pids, 1.0) == []


def test_a_forked_child_has_a_guardian_of_its_own() -> None:
    """A fork gives up the inherited guardian; its workers end with it, not with its parent's death only."""
    code = (
        HEAD
        + """
outer = worker(asleep)
theirs = guardian.pid()
pid = os.fork()
if pid == 0:
    assert guardian.pid() is None
    assert len([fd for fd in os.listdir("/proc/self/fd") if "pidfd" in os.path.realpath(f"/proc/self/fd/{fd}")]) == 0
    inner = worker(asleep)
    assert guardian.pid() != theirs
    say([os.getpid(), guardian.pid(), *inner])
    time.sleep(60)
say(outer)
time.sleep(60)
"""
    )
    with running(code) as program:
        lists = sorted([program.workers(), program.workers()], key=len)
        (outer,), (child, *inner) = lists
        os.kill(child, signal.SIGKILL)
        assert survivors(inner, 1.0) == []
        assert state(outer)
        program.kill()
        assert survivors([outer], 1.0) == []


def test_signals_for_the_whole_job_do_not_end_the_guardian() -> None:
    """A service manager signals all processes of a job; the guardian waits for its user."""
    code = (
        HEAD
        + """
found = worker(asleep)
for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    os.kill(guardian.pid(), signum)
time.sleep(0.3)
say(found + [guardian.pid()])
time.sleep(60)
"""
    )
    with running(code) as program:
        pids = program.workers()
        program.kill()
        assert survivors(pids, 1.0) == []


def test_the_guardian_keeps_no_pipe_of_the_user_open() -> None:
    """Who reads the user's output to its end gets the end when the user and its workers are gone."""
    code = (
        HEAD
        + """
read, write = os.pipe()
os.set_inheritable(write, True)
pid = worker(asleep)[0]
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
os.close(write)
assert os.read(read, 1) == b""
"""
    )
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", code],
        capture_output=True,
        timeout=10,
        check=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert done.stderr == b""
    assert time.monotonic() - start < 5
