"""`torchcrew stacks`: the report of a program, or a sentence why there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest

from torchcrew.crew import zygote

pytestmark = pytest.mark.timeout(60)


def stacks(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchcrew", "stacks", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, **options)


def test_a_program_is_reported_and_left_alone() -> None:
    process = zygote.get_context().Process(target=time.sleep, args=(60,), name="sleeper 3")
    process.start()
    try:
        deadline = time.monotonic() + 20
        while "sleeper 3 (pid" not in (done := stacks(str(os.getpid()))).stdout:
            assert time.monotonic() < deadline, done
        assert (done.returncode, done.stderr) == (0, "")
        assert "Traceback" not in done.stdout
        # Of the whole program, whose first process this one is, whichever of it is named.
        found = {answer["pid"]: answer for answer in json.loads(stacks(str(process.pid), "--json").stdout)}
        assert found[process.pid]["label"] == "sleeper 3"
        assert found[process.pid]["threads"][0]["is_main"]
        assert found[os.getpid()]["label"] == "the user's process"
        assert "the user's process (pid" in stacks(str(process.pid)).stdout
        assert process.is_alive()
    finally:
        process.kill()
        process.join(10)
        zygote.stop()


def test_a_process_that_does_not_exist() -> None:
    done = stacks(str(2**22 + 1))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"there is no process {2**22 + 1}\n"


def test_a_process_that_has_nothing_of_ours() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        done = stacks(str(process.pid))
        assert done.returncode == 1
        assert done.stderr.startswith(f"nothing of torchcrew is in process {process.pid}")
        assert process.poll() is None
        process.kill()


PROGRAM = """
import sys, time
from torchcrew.crew import stacks, zygote
process = zygote.get_context().Process(target=time.sleep, args=(60,), name="sleeper")
process.start()
print(process.pid, flush=True)
sys.stdin.read()
process.kill()
process.join()
"""


def test_above_several_programs_they_are_listed_and_nobody_is_asked() -> None:
    shell = "import subprocess, sys; [p.wait() for p in [subprocess.Popen(sys.argv[1:]) for _ in range(2)]]"
    command = [sys.executable, "-c", shell, sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        sleepers = [int(process.stdout.readline()) for _ in range(2)]
        done = stacks(str(process.pid))
        assert (done.returncode, done.stdout) == (1, "")
        first, *listed = done.stderr.splitlines()
        assert first == f"process {process.pid} has started several programs, give the pid of one:"
        assert len(listed) == 2
        for line in listed:
            assert "-c \\nimport sys" in line
            one = stacks(line.split()[0])
            assert one.returncode == 0
            assert sum(f"sleeper (pid {pid}" in one.stdout for pid in sleepers) == 1
        process.stdin.close()
        assert process.wait(20) is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_users_process() -> None:
    code = "from torchcrew.launcher import program_report; program_report.report(1)"
    done = subprocess.run(
        [sys.executable, "-c", f"import os; os.setuid(65534); {code}"], capture_output=True, text=True
    )
    if "ModuleNotFoundError" in done.stderr:
        pytest.skip("the other user may not read the package")
    assert "PermissionError: process 1 belongs to another user" in done.stderr


@pytest.mark.parametrize("argument", ["x", "0", "-1", ""])
def test_what_is_no_pid_is_a_usage_error(argument: str) -> None:
    done = stacks(argument)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
