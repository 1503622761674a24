"""Stacks of other processes: in every state they can be in, and without harm."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import torchcrew.multiprocessing as mp
from tests.crew import stacks_cases as cases
from tests.crew.programs import state
from torchcrew.crew import stack_asking, stacks
from torchcrew.crew.stack_text import Frame, Stacks, frames_of, printable
from torchcrew.data import DataLoader

pytestmark = pytest.mark.timeout(60)

HERE = Path(cases.__file__).name


@contextlib.contextmanager
def running(ctx: Any, target: Callable[..., None], *args: Any, name: str | None = None) -> Iterator[Any]:
    """A process that has come to the point at which it stays."""
    ready = ctx.Event()
    process = ctx.Process(target=target, args=(ready, *args), name=name)
    process.start()
    try:
        assert ready.wait(20)
        time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.join(10)


def asked(pid: int, timeout: float = 5.0) -> Stacks:
    (answer,) = stacks.ask([pid], timeout)
    return answer


def functions(answer: Stacks) -> list[str]:
    return [frame.function for frame in answer.main if os.path.basename(frame.file) == HERE]


def text_bytes(pid: int) -> int:
    """How much stands in the memfd of a process."""
    found = stack_asking._find(pid)
    assert found is not None
    size = os.fstat(found[0]).st_size
    os.close(found[0])
    return size - stack_asking.TEXT


# Where a process may be -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "does"),
    [
        (cases.sleep_in_python, "sleeps"),
        (cases.read_a_pipe, "sleeps"),
        (cases.hold_the_interpreter, "sleeps"),
        (cases.match_for_ever, "runs"),
        (cases.compute_in_python, "runs"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_process_tells_where_it_is(ctx: Any, target: Any, does: str) -> None:
    """In a sleep, a system call, native code with the interpreter's lock, and in Python; and it goes on, there."""
    with running(ctx, target, name="some name") as process:
        for _ in range(3):
            answer = asked(process.pid)
            assert answer.problem == ""
            assert (answer.label, answer.user) == ("some name", os.getpid())
            assert functions(answer) == [target.__name__]
            assert answer.state in (does, "runs")  # a busy machine
            (main,) = [thread for thread in answer.threads if thread.is_main]
            assert main == answer.threads[0]
        assert process.is_alive()


def test_all_threads_are_told_the_main_one_first(ctx: Any) -> None:
    with running(ctx, cases.wait_in_a_thread) as process:
        answer = asked(process.pid)
        assert [thread.is_main for thread in answer.threads] == [True, False]
        assert functions(answer) == ["wait_in_a_thread"]
        assert "waiting" in [frame.function for frame in answer.threads[1].frames]


def test_a_deep_stack_has_its_innermost_frames(ctx: Any) -> None:
    """faulthandler writes a hundred."""
    with running(ctx, cases.wait_deep_down) as process:
        answer = asked(process.pid)
        assert functions(answer)[:2] == ["wait", "deeper"]
        assert len(answer.main) == 100


@pytest.mark.parametrize(
    ("how", "method"),
    [
        pytest.param(how, method, marks=pytest.mark.faults if (how, method) == ("exec", "forkserver") else ())
        for how in ("zygote", "exec")
        for method in ("fork", "spawn", "forkserver", "zygote")
    ],
)
def test_every_start_method_offers(monkeypatch: pytest.MonkeyPatch, ctx: Any, method: str, how: str) -> None:
    monkeypatch.setenv("TORCHCREW_START", how)
    with running(mp.get_context(method), cases.sleep_in_python, name="x") as process:
        answer = asked(process.pid)
        assert (answer.label, answer.user, functions(answer)) == ("x", os.getpid(), ["sleep_in_python"])


def test_a_fork_without_a_word_offers_its_own(ctx: Any) -> None:
    pids = ctx.SimpleQueue()
    with running(ctx, cases.fork_and_wait, pids, name="parent") as process:
        child = pids.get()
        for _ in range(2):  # each answers for itself, at once
            parents, childs = stacks.ask([process.pid, child], 5)
            assert (childs.label, childs.user) == ("forked by parent", process.pid)
            assert (parents.pid, parents.label, childs.pid) == (process.pid, "parent", child)
            assert childs.problem == parents.problem == ""
            lines = [answer.main[0].line for answer in (parents, childs)]
            assert lines[0] != lines[1]
        os.kill(child, signal.SIGKILL)


def test_a_loader_worker_is_asked_while_its_dataset_waits(ctx: Any) -> None:
    loader = DataLoader(cases.SlowDataset(), num_workers=2, batch_size=1, multiprocessing_context=ctx)
    iterator = iter(loader)
    next(iterator)
    workers = [process.pid for process in iterator._workers]
    slow = eventually(lambda: asked(workers[1]), lambda answer: "__getitem__" in functions(answer))
    assert (slow.label, slow.user) == ("loader worker 1", os.getpid())
    assert asked(workers[0]).label == "loader worker 0"
    assert set(workers) <= set(stacks.members(os.getpid()))
    iterator._workers[1].kill()
    with pytest.raises(RuntimeError, match="worker"):
        list(iterator)


def test_a_pool_worker_is_asked(ctx: Any) -> None:
    with mp.get_context("zygote").Pool(1) as pool:
        pool.apply_async(cases.sleep, (60,))
        (worker,) = pool._pool
        answer = eventually(lambda: asked(worker.pid), lambda answer: bool(functions(answer)))
        assert (answer.label, functions(answer)) == ("pool worker 0", ["sleep"])


def gather(rank: int, ready: str) -> None:
    """Rank 1 never comes."""
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    Path(f"{ready}{rank}").touch()
    if rank:
        cases.sleep(60)
    torch.distributed.all_reduce(torch.ones(1))


def test_ranks_are_asked_in_a_collective(tmp_path: Path) -> None:
    """gloo waits in native code, and goes on waiting afterwards."""
    context = mp.spawn(gather, (str(tmp_path / "ready"),), nprocs=2, join=False)
    assert context is not None
    try:
        eventually(lambda: len(list(tmp_path.iterdir())), lambda count: count == 2)
        pids = [process.pid for process in context.processes]
        answers = eventually(
            lambda: stacks.ask(pids, 5), lambda found: "all_reduce" in [frame.function for frame in found[0].main]
        )
        assert [answer.label for answer in answers] == ["rank 0", "rank 1"]
        time.sleep(0.1)
        assert all(process.is_alive() for process in context.processes)
    finally:
        for process in context.processes:
            process.kill()
            process.join(10)


def eventually(look: Callable[[], Any], holds: Callable[[Any], bool], seconds: float = 20) -> Any:
    deadline = time.monotonic() + seconds
    while not holds(seen := look()):
        assert time.monotonic() < deadline, seen
        time.sleep(0.02)
    return seen


# Why there may be no answer -------------------------------------------------------------------------------------------


def test_a_stopped_process_is_left_stopped_and_sent_nothing(ctx: Any) -> None:
    with running(ctx, cases.sleep_in_python) as process:
        os.kill(process.pid, signal.SIGSTOP)
        eventually(lambda: state(process.pid), lambda letter: letter == "T")
        answer = asked(process.pid, 0.2)
        assert answer.problem == "is stopped (SIGSTOP, Ctrl-Z or a debugger)"
        assert (answer.state, answer.threads) == ("is stopped", ())
        assert state(process.pid) == "T"
        status = Path(f"/proc/{process.pid}/status").read_text()
        pending = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))]
        assert not any(mask >> (stacks.SIGNAL - 1) & 1 for mask in pending)
        os.kill(process.pid, signal.SIGCONT)
        eventually(lambda: state(process.pid), lambda letter: letter == "S")
        time.sleep(0.05)
        assert text_bytes(process.pid) == 0
        assert functions(asked(process.pid)) == ["sleep_in_python"]


def test_one_that_blocks_the_signal_says_so(ctx: Any) -> None:
    with running(ctx, cases.block_the_signal, int(stacks.SIGNAL)) as process:
        assert asked(process.pid, 0.2).problem == "blocks the signal that asks"


@pytest.mark.parametrize("ended", ["reaped", "zombie"])
def test_one_that_has_ended(ended: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    if ended == "reaped":
        process.wait(20)
    else:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert asked(process.pid, 0.2) == Stacks(process.pid, problem="has ended", state=asked(process.pid).state)
    assert not stacks.exists(process.pid)
    process.wait(20)


def test_one_that_dies_while_it_is_asked(ctx: Any) -> None:
    """Nobody waits for it to the deadline."""
    with running(ctx, cases.sleep_in_python) as process:
        question = stack_asking._Question(process.pid)
        while question._to_ask is None:
            assert not question.step(False)
        os.kill(process.pid, signal.SIGKILL)
        process.join(10)
        os.ftruncate(question._memfd, stack_asking.TEXT)  # as if it had died before it wrote
        assert question.step(False)
        assert question.answer is not None
        assert question.answer.problem == "has ended"


@pytest.mark.parametrize("program", [[sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], ["cat"]])
def test_a_stranger_survives_being_asked_about(program: list[str]) -> None:
    """The signal's default action would kill it."""
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        answers = [asked(process.pid, 0.2) for _ in range(3)]
        assert all("was not started by torchcrew" in answer.problem for answer in answers)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        process.kill()


@pytest.mark.parametrize("target", [cases.become_another_program, cases.close_everything])
def test_one_that_no_longer_offers_survives(ctx: Any, target: Any) -> None:
    """A new program does not catch the signal; one that closed the memfd would write into another file."""
    with running(ctx, target) as process:
        answer = eventually(lambda: asked(process.pid, 0.5), lambda answer: bool(answer.problem))
        assert "was not started by torchcrew" in answer.problem
        time.sleep(0.1)
        assert process.is_alive()


def test_a_handler_that_was_taken_away_is_not_sent_the_signal() -> None:
    """The memfd alone is no licence."""
    code = (
        "import faulthandler, time; from torchcrew.crew import stacks; stacks.offer('x'); "
        "faulthandler.unregister(stacks.SIGNAL); print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert asked(process.pid, 0.3).problem == "does not listen to the signal that asks any more"
        assert process.poll() is None
        process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_users_process_is_left_alone(ctx: Any) -> None:
    with running(ctx, cases.sleep_in_python) as process:
        pid = os.fork()
        if not pid:
            code = 1
            with contextlib.suppress(BaseException):
                os.setuid(65534)
                code = 0 if asked(process.pid, 0.2).problem == "belongs to another user" else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert process.is_alive()


def test_who_asks_and_never_finishes_delays_others_to_their_deadline_only(ctx: Any) -> None:
    with running(ctx, cases.sleep_in_python) as process:
        question = stack_asking._Question(process.pid)
        while question._to_ask is None:
            assert not question.step(False)
        assert asked(process.pid, 0.1).problem == "is being asked by somebody else who does not finish"
        question.close()
        assert functions(asked(process.pid)) == ["sleep_in_python"]


# Many ----------------------------------------------------------------------------------------------------------------


def test_many_ask_many_at_once(ctx: Any) -> None:
    """Each gets a whole answer of its own, in the order it asked for."""
    with running(ctx, cases.sleep_in_python) as one, running(ctx, cases.wait_deep_down) as two:
        own = [[one.pid, two.pid], [two.pid, one.pid]]
        with ThreadPoolExecutor(8) as executor:
            found = list(executor.map(lambda number: stacks.ask(own[number % 2], 20), range(40)))
        for number, answers in enumerate(found):
            assert [answer.pid for answer in answers] == own[number % 2]
            first, second = answers if number % 2 == 0 else reversed(answers)
            assert (functions(first), functions(second)[:2]) == (["sleep_in_python"], ["wait", "deeper"])
            assert len(second.main) == 100


def test_the_memfd_does_not_grow(ctx: Any) -> None:
    with running(ctx, cases.sleep_in_python) as process:
        asked(process.pid)
        once = text_bytes(process.pid)
        for _ in range(10):
            asked(process.pid)
        assert 0 < text_bytes(process.pid) <= 2 * once


def test_work_is_not_disturbed(ctx: Any) -> None:
    """Sleeps, reads and a shared value give what they give without being asked."""
    value = mp.get_context("zygote").Value("q", 0)
    with running(mp.get_context("zygote"), cases.count, value, 600) as process:
        answers = []
        while process.is_alive():
            answers += stacks.ask([process.pid], 5)
        process.join(10)
        assert (process.exitcode, value.value) == (0, 600)
        assert sum(not answer.problem for answer in answers) > 10


@pytest.mark.faults  # rarely fails: the handler leaves another errno, see the plan
def test_threads_that_come_and_go_are_told(ctx: Any) -> None:
    """faulthandler looks at frames of threads that run; the process survives it."""
    with running(ctx, cases.busy_threads) as process:
        for _ in range(200):
            answer = asked(process.pid)
            assert answer.problem == ""
            assert answer.threads[0].is_main
        assert process.is_alive()


def test_a_late_answer_is_no_part_of_the_next_one() -> None:
    """What came after the deadline of who asked is followed by the answer that counts."""
    old = 'Stack (most recent call first):\n  File "a.py", line 1 in f\n'
    assert frames_of(old + old.replace("line 1", "line 2")) == (Frame("a.py", 2, "f"),)


# To offer -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["twice", "without_descriptors", "then_execute", "from_a_thread"])
def test_offering(case: str) -> None:
    """In a fresh process: this one may offer already."""
    code = f"from tests.crew import offer_cases; offer_cases.{case}()"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


# Who belongs together -------------------------------------------------------------------------------------------------


def test_children_of_a_dead_zygote_still_belong_to_their_user(ctx: Any) -> None:
    from torchcrew.crew import zygote

    with running(ctx, cases.sleep_in_python) as process:
        zygote.stop()
        belong = stacks.members(os.getpid())
        assert {os.getpid(), process.pid} <= set(belong)
        assert stacks.members(process.pid) == [process.pid]
        assert os.getppid() not in belong
        assert stacks.Processes(process.pid).program_of(process.pid) == os.getpid()


def processes(parents: dict[int, int], users: dict[int, int]) -> stacks.Processes:
    """As if these were all that there are."""
    made = stacks.Processes.__new__(stacks.Processes)
    made._parents, made._users = parents, users
    return made


def test_programs_are_the_first_users() -> None:
    """A shell, 1, above two programs; 12 is a worker of 11, a rank; 30 is a program that a rank has started."""
    found = processes(
        {1: 0, 10: 1, 11: 10, 12: 5, 20: 1, 21: 20, 30: 11, 31: 30},
        {10: 0, 11: 10, 12: 11, 20: 0, 21: 20, 30: 0, 31: 30},
    )
    assert found.programs(1) == [10, 20]
    assert found.of(10) == [10, 11, 12, 30, 31]
    assert [found.program_of(pid) for pid in (1, 10, 12, 21, 31)] == [1, 10, 10, 20, 30]
    assert found.programs(10) == [10]
    assert found.programs(12) == []


def test_a_forged_circle_of_users_ends() -> None:
    found = processes({7: 1, 8: 1}, {7: 8, 8: 7})
    assert found.program_of(7) == 8
    assert found.programs(7) == []
    assert found.of(7) == [7, 8]


def test_what_is_not_printable_is_an_escape() -> None:
    text = printable("\x1b[31mrank 0\n\u202e\udc80\x9b ä漢")
    assert text == "\\x1b[31mrank 0\\n\\u202e\\udc80\\x9b ä漢"


# faulthandler's text --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "frames"),
    [
        ("", []),
        ("Fatal nonsense\n\n", []),
        ('Stack (most recent call first):\n  File "a b.py", line 3 in f\n', [("a b.py", 3, "f")]),
        ('Thread 0x0a [w] (most recent call first):\n  File "a", line 3 in f\n', [("a", 3, "f")]),
        ('  File "\\xe4\\u20ac\\U0001f600", line ??? in <lambda>\n', [("ä€😀", 0, "<lambda>")]),
        ('  File "\\Uffffffff", line 1 in \\U00ffffff\n', [("\\Uffffffff", 1, "\\U00ffffff")]),
        ("Stack (most recent call first):\n  <no Python frame>\n", []),
        ("  File ???, line ??? in ???\n", [("???", 0, "???")]),
        ('  Garbage-collecting\n  File "a", line 1 in g\n  ...\n', [("a", 1, "g")]),
        ('  File "a", line 1 in g\n  File "b", li', [("a", 1, "g")]),
    ],
)
def test_what_faulthandler_writes_is_read(text: str, frames: Any) -> None:
    assert frames_of(text) == tuple(Frame(*frame) for frame in frames)
