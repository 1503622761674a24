"""A process that offers its stacks, and looks at what that costs: each of these runs in a fresh one."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import threading
import time

from torchcrew.crew import stacks
from torchcrew.crew.stack_text import Stacks


def asked(pid: int, timeout: float = 5.0) -> Stacks:
    (answer,) = stacks.ask([pid], timeout)
    return answer


def twice() -> None:
    """It costs one descriptor, and the second time changes the label."""
    assert stacks.descriptors() == ()
    before = len(os.listdir("/proc/self/fd"))
    stacks.offer("first")
    stacks.offer("second", user=1)
    stacks.offer("ä" * 200)  # longer than there is room for
    assert len(stacks.descriptors()) == 1
    assert len(os.listdir("/proc/self/fd")) == before + 1
    answer = asked(os.getpid())
    assert answer.user == 1
    assert answer.label.startswith("ä" * 100)
    assert "twice" in [frame.function for frame in answer.main]
    assert not os.get_inheritable(stacks.descriptors()[0])


def without_descriptors() -> None:
    """Silent in the process itself, and in its forks, which must not write into their parent's memfd."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        stacks.offer("none")
        assert stacks.descriptors() == ()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    stacks.offer("parent")
    resource.setrlimit(resource.RLIMIT_NOFILE, (stacks.descriptors()[0] + 1, hard))
    try:
        pid = os.fork()
        if not pid:
            time.sleep(60)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        assert "was not started by torchcrew" in asked(pid, 0.2).problem
        assert stacks.members(os.getpid())
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def then_execute() -> None:
    """A program that is executed has no memfd of ours."""
    stacks.offer("parent")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        assert "was not started by torchcrew" in asked(process.pid, 0.2).problem
        process.kill()


def from_a_thread() -> None:
    """It is the same from a thread."""

    def work() -> None:
        stacks.offer("x")
        offered.set()
        asked_for.wait(20)

    offered, asked_for = threading.Event(), threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    assert offered.wait(20)
    answer = asked(os.getpid())
    asked_for.set()
    thread.join()
    assert answer.threads[0].is_main
    assert any(frame.function == "work" for found in answer.threads[1:] for frame in found.frames)
