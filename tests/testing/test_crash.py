"""Ways to die, and programs that are run to their end or to a deadline."""

import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchcrew.testing import procfs
from torchcrew.testing.crash import (
    CASES,
    CRASH_TEXT,
    ENDING_CASES,
    TOKEN_VARIABLE,
    CrashCase,
    die,
    kill_at_random,
    processes_with_token,
    run_program,
)

DIE = """
    import sys
    from torchcrew.testing.crash import die
    die(sys.argv[1])
    print("survived")
"""


@pytest.mark.parametrize("case", ENDING_CASES, ids=str)
def test_every_way_to_end_gives_its_exit_code(case):
    """A program that dies so is seen with the code of the table, and prints no more."""
    result = run_program(DIE, case.how, timeout=15)
    assert (result.returncode, result.stdout, result.timed_out, result.left_behind) == (case.exitcode, "", False, ())
    assert (CRASH_TEXT in result.stderr) == (case.how == "exception")


@pytest.mark.parametrize("case", ENDING_CASES, ids=str)
def test_a_worker_can_die_so_too(case):
    """`die` is picklable and works in a worker of multiprocessing, with the same code."""
    process = multiprocessing.get_context("fork").Process(target=_quietly_die, args=(case,))
    process.start()
    process.join(10)
    assert process.exitcode == case.exitcode
    process.close()


def _quietly_die(case):
    faulthandler.disable()  # it has something to say, and so has multiprocessing
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    die(case)


def test_a_stopped_worker_is_there_and_does_nothing():
    """SIGSTOP: state T, not ended."""
    process = multiprocessing.get_context("fork").Process(target=die, args=("sigstop",))
    process.start()
    _wait_until(lambda: procfs.read_process(process.pid).state == "T")
    process.kill()
    process.join(10)
    process.close()


def test_a_worker_asleep_with_the_gil_runs_no_other_thread():
    """A thread that counts stands still while `die("gil")` sleeps."""
    source = """
        import os, threading, time
        from torchcrew.testing.crash import die
        def count():
            while True:
                time.sleep(0.01)
                os.write(1, b".")
        threading.Thread(target=count, daemon=True).start()
        time.sleep(0.1)
        os.write(1, b"|")
        die("gil", seconds=0.5)
        os.write(1, b"|")
        os._exit(0)
    """
    before, asleep, _ = run_program(source, timeout=15).check().stdout.split("|")
    assert before.count(".") >= 3
    assert len(asleep) <= 2  # instead of 50; it had a moment before and after the sleep


def test_the_table_is_complete_and_wrong_names_are_refused():
    """Seven ways; a wrong one names those that are."""
    assert [case.how for case in CASES] == ["sigkill", "sigsegv", "exit", "abort", "exception", "gil", "sigstop"]
    assert CASES[-1].ends is False
    with pytest.raises(ValueError, match=r"how should be one of sigkill, .*, but got 'poison'"):
        die(CrashCase("poisoned", "poison"), core=True)


def test_a_program_gives_its_output_and_status(tmp_path):
    """Text or file, arguments, environment and folder reach it; output and status come back."""
    source = """
        import os, sys
        print(sys.argv[1:], os.environ["ADDED"], "REMOVED" in os.environ, os.getcwd())
        sys.exit("no")
    """
    os.environ["REMOVED"] = "1"
    try:
        result = run_program(source, "a", "b c", env={"ADDED": "1", "REMOVED": ""}, cwd=tmp_path, timeout=15)
    finally:
        del os.environ["REMOVED"]
    assert result.stdout == f"['a', 'b c'] 1 False {tmp_path}\n"
    assert (result.returncode, result.stderr) == (1, "no\n")
    with pytest.raises(AssertionError, match=r"ended with 1 after(.|\n)*--- stderr\nno"):
        result.check()
    path = Path(tmp_path, "file.py")
    path.write_text("print(__file__)")
    assert run_program(path, timeout=15).check().stdout == f"{path}\n"


def test_the_deadline_prints_the_stacks_and_kills():
    """At the deadline every thread's stack is in stderr, and the program is gone, stopped children too."""
    source = """
        import os, signal, time
        if os.fork() == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        def spin_forever():
            while True:
                time.sleep(0.01)
        spin_forever()
    """
    result = run_program(source, timeout=0.8, grace=0.1)
    assert result.timed_out
    assert result.returncode == -signal.SIGABRT
    assert "in spin_forever" in result.stderr
    assert len(result.left_behind) == 1
    assert 0.8 <= result.seconds < 4
    assert not _still_alive(result.left_behind)


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("reparented, its own session", "os.fork() or (os.setsid(), os.fork() and os._exit(0), time.sleep(60))"),
        ("executed", 'subprocess.Popen(["setsid", "--fork", "sleep", "60"])'),
        ("without the token", 'subprocess.Popen(["sleep", "60"], env={})'),
    ],
)  # fmt: skip
def test_what_a_program_leaves_running_is_found_and_killed(name, start):
    """A process that outlives its program is reported and killed, wherever it went."""
    result = run_program(
        f"import os, subprocess, sys, time\n{start}\ntime.sleep(0.3)\nos._exit(0)", grace=0.2, timeout=15
    )
    assert result.returncode == 0
    assert len(result.left_behind) == 1, result
    assert not _still_alive(result.left_behind)
    with pytest.raises(AssertionError, match="left behind: pid"):
        result.check()


def test_a_process_that_ends_within_the_grace_is_not_left_behind():
    """`settled` says how long the last process outlived the first."""
    result = run_program(
        "import subprocess\nsubprocess.Popen(['sleep', '0.4'])\nimport os\nos._exit(0)", grace=5, timeout=15
    )
    assert result.check().left_behind == ()
    assert 0.1 < result.settled < 2


def test_a_program_can_be_killed_from_outside():
    """`on_start` gets pid and token; the token finds the processes of this program and of no other."""
    seen = []

    def kill(pid, token):
        _wait_until(lambda: len(processes_with_token(token)) == 2)
        seen.extend(process.pid for process in processes_with_token(token))
        os.kill(pid, signal.SIGKILL)

    result = run_program("import os, time\nos.fork()\ntime.sleep(60)", on_start=kill, grace=0.1, timeout=15)
    assert result.returncode == -signal.SIGKILL
    assert [left.pid for left in result.left_behind] == sorted(seen)[1:]
    assert processes_with_token("no such token") == ()


def test_a_program_run_by_a_program_carries_both_tokens():
    """The outer one still finds what the inner one started."""
    source = f"""
        import os
        from torchcrew.testing.crash import run_program
        inner = run_program("import os; print(os.environ['{TOKEN_VARIABLE}'])").check().stdout.strip()
        print(inner.startswith(os.environ["{TOKEN_VARIABLE}"] + ":"))
    """
    assert run_program(source, timeout=15).check().stdout == "True\n"


def test_random_kills_hit_living_processes_and_repeat_with_the_seed():
    """The same seed picks the same victims; each was alive and dies by SIGKILL."""

    def victims(seed):
        processes = [subprocess.Popen(["sleep", "60"]) for _ in range(5)]

        def alive():
            return [process.pid for process in processes if process.poll() is None]

        order = sorted(alive())
        killed = kill_at_random(alive, 3, seed, longest_wait=0.01, deadline=10)
        codes = {process.wait(5) for process in processes if process.pid in killed}
        for process in processes:
            process.kill()
            process.wait(5)
        assert codes == {-signal.SIGKILL}
        assert len(set(killed)) == 3
        return [order.index(pid) for pid in killed]

    assert victims(7) == victims(7)


def test_random_kills_end_at_the_deadline():
    """With nobody to kill it gives up in time."""
    start = time.monotonic()
    assert kill_at_random(list, 3, 1, deadline=0.2) == ()
    assert time.monotonic() - start < 2


def _still_alive(processes):
    """Those that live two seconds after they were killed."""
    end = time.monotonic() + 2
    while True:
        now = [procfs.read_process(process.pid) for process in processes]
        alive = [was for was, is_now in zip(processes, now, strict=True) if was == is_now and not is_now.is_zombie]
        if not alive or time.monotonic() > end:
            return alive
        time.sleep(0.01)


def _wait_until(condition):
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_programs_use_this_interpreter():
    """The same Python, with the same packages."""
    assert run_program("import sys; print(sys.executable)", timeout=15).check().stdout.strip() == sys.executable
