"""The explanation of a hang: where each rank is, who is missing, whose stacks are equal."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launcher import hang_cases as cases
from torchcrew.crew import stacks, zygote
from torchcrew.crew.stack_text import Frame, Stacks, Thread
from torchcrew.launcher import frames, hang, program_report
from torchcrew.launcher.hang import Member, explain
from torchcrew.launcher.ledger import Call, Ledger, Phase
from torchcrew.launcher.program_report import report

pytestmark = pytest.mark.timeout(60)

HERE = Path(cases.__file__).name


@pytest.fixture(scope="module", autouse=True)
def _zygote_ends() -> Iterator[None]:
    yield
    zygote.stop()


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    ledger = Ledger.create(4)
    yield ledger
    ledger.close()


@contextlib.contextmanager
def crew(ledger: Ledger, *what: str) -> Iterator[list[Any]]:
    """Ranks that do so, each where it will stay."""
    ctx = zygote.get_context()
    ready = ctx.Semaphore(0)
    processes = [
        ctx.Process(target=cases.be, args=(ledger, rank, how, ready), name=f"rank {rank}")
        for rank, how in enumerate(what)
    ]
    try:
        for rank, process in enumerate(processes):
            process.start()
            ledger.set_pid(rank, process.pid)
        for _ in processes:
            assert ready.acquire(timeout=20)
        yield processes
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join(10)


def members_of(processes: list[Any], **ended: str) -> list[Member]:
    return [Member(rank, process.pid) for rank, process in enumerate(processes)]


def eventually(look: Callable[[], str], *parts: str, seconds: float = 20) -> str:
    """What is said when all these parts are in it."""
    deadline = time.monotonic() + seconds
    while not all(part in (text := look()) for part in parts):
        assert time.monotonic() < deadline, f"{parts} not in:\n{text}"
        time.sleep(0.05)
    return text


def line_of(function: str) -> int:
    """The last line of a function of the cases."""
    lines = Path(cases.__file__).read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if f"def {function}(" in line)
    rest = [number for number in range(first + 1, len(lines)) if lines[number][:1] not in (" ", "", ")")]
    return max(number for number in range(first, rest[0] if rest else len(lines)) if lines[number].strip()) + 1


# The sentence ---------------------------------------------------------------------------------------------------------


def test_the_first_sentence_says_where_everybody_is(ledger: Ledger) -> None:
    """The example of the guide, with a DataLoader's item instead of a collective."""
    with crew(ledger, "waits", "waits", "gets_an_item", "waits") as processes:
        sentence = (
            "ranks 0, 1, 3 wait in all_reduce #118 (train.py:40); "
            f"rank 2 is in Digits.__getitem__ ({HERE}:{line_of('__getitem__') - 1})\n"
            "missing from all_reduce #118: rank 2 (last was in #117)\n"
        )
        text = eventually(lambda: explain(members_of(processes), ledger), sentence)
    assert text.startswith(sentence)
    pids = ", ".join(str(processes[rank].pid) for rank in (0, 1, 3))
    assert f"ranks 0, 1, 3 (pids {pids}, sleeps):\n  > " in text
    assert f"rank 2 (pid {processes[2].pid}, sleeps):\n  > " in text
    assert text.count("_waits\n") == 1  # merged
    assert "\n    ..." in text


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("returns", ["rank 1 has returned", "missing from all_reduce #118: rank 1 (last was in #117)"]),
        ("fails", ["rank 1 has failed"]),
        ("idles", ["rank 1 waits for something to run"]),
        ("ends", ["rank 1 has ended", "missing from all_reduce #118: rank 1 (last was in #117)"]),
        ("is_ahead", ["rank 1 waits in all_reduce #119 (train.py:40)", "ahead of all_reduce #118: rank 1 (at #119)"]),
        ("receives", ["rank 1 waits in recv (src=0, train.py:44)"]),
        ("waits_in_a_group", ["rank 1 waits in broadcast #3 of group tp (train.py:50)"]),
        pytest.param(
            "loads",
            ["rank 1 waits for its loader's workers in _loads", "rank 1's loader worker 0 is in Digits.__getitem__"],
            marks=pytest.mark.faults,  # a report has the same by default, below
        ),
    ],
)
def test_what_a_rank_may_do(ledger: Ledger, what: str, parts: list[str]) -> None:
    with crew(ledger, "waits", what) as processes:
        eventually(lambda: explain(members_of(processes), ledger), *parts)


def test_a_stopped_rank_is_said_to_be_and_left_so(ledger: Ledger) -> None:
    with crew(ledger, "waits", "gets_an_item") as processes:
        eventually(lambda: explain(members_of(processes), ledger), "rank 0 waits in", "rank 1 is in Digits")
        for process in processes:
            os.kill(process.pid, signal.SIGSTOP)
        stopped = "is stopped (SIGSTOP, Ctrl-Z or a debugger)"
        eventually(
            lambda: explain(members_of(processes), ledger),
            f"rank 0 {stopped} in all_reduce #118 (train.py:40)",
            f"rank 1 {stopped}\n",
        )
        assert all(stacks.ask([process.pid])[0].state == "is stopped" for process in processes)


def test_how_a_rank_ended_is_said_by_who_knows(ledger: Ledger) -> None:
    with crew(ledger, "waits", "waits") as processes:
        processes[1].kill()
        processes[1].join(10)
        members = [Member(0, processes[0].pid), Member(1, processes[1].pid, "killed by SIGKILL")]
        text = eventually(lambda: explain(members, ledger), "rank 1 has ended: killed by SIGKILL")
        assert "    (has ended)" in text


def test_ranks_of_a_second_host_have_their_numbers(ledger: Ledger) -> None:
    """The ledger knows those of this host from 0 on."""
    with crew(ledger, "waits", "gets_an_item") as processes:
        members = [Member(4 + rank, process.pid) for rank, process in enumerate(processes)]
        eventually(lambda: explain(members, ledger), "rank 4 waits in all_reduce #118", "rank 5 is in", "rank 5 (last")


def test_a_rank_that_has_not_begun_is_starting(ledger: Ledger) -> None:
    assert explain([Member(0, 2**22 + 1)], ledger).startswith("rank 0 has ended")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        ledger.set_pid(0, process.pid)
        assert explain([Member(0, process.pid)], ledger).startswith("rank 0 was not started by torchcrew")
        process.kill()


def answered(pid: int, *found: Frame, problem: str = "") -> Stacks:
    return Stacks(pid, "", "sleeps", (Thread(pid, "", True, found),) if found else (), problem)


def test_groups_of_any_size_are_put_in_words(ledger: Ledger) -> None:
    many = Ledger.create(64)
    try:
        for rank in range(64):
            many.enter(rank, Phase.RUNNING)
            if rank != 5:
                many.begin(rank, Call("barrier", sequence=1, site="a.py:1"))
        answers = {pid: answered(pid, Frame("/u/a.py", 1, "f")) for pid in range(64)}
        text = hang.explained([Member(rank, rank) for rank in range(64)], many, answers)
    finally:
        many.close()
    assert text.splitlines()[:2] == [
        "ranks 0-4, 6-63 wait in barrier #1 (a.py:1); rank 5 is in f (a.py:1)",
        "missing from barrier #1: rank 5 (was in none yet)",
    ]


def test_a_backward_is_told_with_its_step(ledger: Ledger) -> None:
    """What torch's C++ code exchanges by itself is in no ledger."""
    ledger.enter(0, Phase.RUNNING)
    for _ in range(12):
        ledger.step(0)
    torch = Path(os.__file__).parent / "site-packages/torch"
    stack = (
        Frame(f"{torch}/autograd/graph.py", 979, "_engine_run_backward"),
        Frame(f"{torch}/autograd/__init__.py", 395, "backward"),
        Frame(f"{torch}/_tensor.py", 623, "backward"),
        Frame("/u/train.py", 51, "train"),
    )
    says = "rank 0 is in backward of step 12 of DistributedDataParallel (train.py:51)"
    assert hang.explained([Member(0, 7)], ledger, {7: answered(7, *stack)}).startswith(says)
    inside = (Frame("/u/loss.py", 7, "backward"), *stack)  # the user's own function, in it
    assert hang.explained([Member(0, 7)], ledger, {7: answered(7, *inside)}).startswith(
        "rank 0 is in backward (loss.py"
    )


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        ("blocks the signal that asks", "ranks 0, 1 block the signal that asks"),
        ("gave no answer in time", "ranks 0, 1 gave no answer in time"),
        ("is being asked by somebody else who does not finish", "ranks 0, 1 are being asked by"),
    ],
)
def test_several_with_a_problem_are_a_plural(ledger: Ledger, problem: str, says: str) -> None:
    ledger.enter(0, Phase.RUNNING)
    ledger.enter(1, Phase.RUNNING)
    answers = {pid: answered(pid, problem=problem) for pid in (7, 8)}
    assert hang.explained([Member(0, 7), Member(1, 8)], ledger, answers).startswith(says)


# Frames ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "users"),
    [
        ("/home/a/train.py", True),
        ("<string>", True),
        ("<stdin>", True),
        ("/tmp/ipykernel_7/1.py", True),
        ("/x/lib/python3.11/site-packages/lightning/trainer.py", False),
        ("/x/bin/torchcrew", False),
        ("/x/lib/python3.11/site-packages/torch/nn/module.py", False),
        ("/x/lib/python3/dist-packages/torch/nn/module.py", False),
        ("/x/lib/python3.13t/threading.py", False),
        ("/x/lib/python3.10/multiprocessing/process.py", False),
        ("<frozen runpy>", False),
        (os.__file__, False),
        (frames.__file__, False),
        ("/home/torch/train.py", True),
    ],
)
def test_whose_a_frame_is(file: str, users: bool) -> None:
    assert frames.is_users(Frame(file, 1, "f")) is users


SOURCE = """
def f():
    def f():
        pass

class A:
    class B:
        async def f(self):
            pass

    @property
    def g(self):
        return [f for f in ()]
"""


@pytest.mark.parametrize(
    ("line", "function", "name"),
    [
        (2, "f", "f"),
        (4, "f", "f"),
        (9, "f", "A.B.f"),
        (13, "g", "A.g"),
        (13, "<listcomp>", "<listcomp>"),
        (99, "g", "g"),
    ],
)
def test_a_method_has_its_class(tmp_path: Path, line: int, function: str, name: str) -> None:
    path = tmp_path / "source.py"
    path.write_text(SOURCE)
    assert frames.place(Frame(str(path), line, function)) == f"{name} (source.py:{line})"


@pytest.mark.parametrize("content", [b"class A:\n  def f(", b"\x00", b"\xff\xfe", None])
def test_a_source_that_cannot_be_read_leaves_the_bare_name(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "source.py"
    if content is not None:
        path.write_bytes(content)
    assert frames.qualified(Frame(str(path), 2, "f")) == "f"


def test_an_installed_program_has_a_place_as_well() -> None:
    package = Frame("/x/lib/python3.11/site-packages/app/main.py", 3, "work")
    stack = (Frame("/x/lib/python3.11/threading.py", 1, "wait"), package)
    assert frames.users_frame(stack) == package
    assert frames.users_frame((*stack, Frame("/u/a.py", 3, "f"))) == Frame("/u/a.py", 3, "f")


def test_what_only_starts_a_process_is_not_the_users() -> None:
    started = (Frame(f"{Path(stacks.__file__).parent}/zygote_main.py", 1, "main"), Frame("<string>", 1, "<module>"))
    own = (Frame("/x/lib/python3.11/threading.py", 1, "join"), Frame("<string>", 1, "<module>"))
    assert frames.users_frame(started[1:]) == started[1]
    assert frames.users_frame(own) == own[1]
    found = frames.users_frame((Frame("/u/a.py", 3, "f"), *started))
    assert found == Frame("/u/a.py", 3, "f")
    (line, rest) = frames.lines_of([Thread(1, "", True, (Frame("/u/a.py", 3, "f"), own[0], *started))])
    assert (line, rest) == ("  > /u/a.py:3 f", "    ...")


def test_deep_recursion_and_other_threads_are_short() -> None:
    deep = (Frame("/u/a.py", 3, "f"),) * 90
    lines = frames.lines_of([Thread(1, "", True, deep), Thread(2, "pin", False, ()), Thread(3, "", False, deep[:1])])
    assert lines == [
        "  > /u/a.py:3 f (90 times)",
        "  thread pin:",
        "    (no Python frame)",
        "  another thread:",
        "  > /u/a.py:3 f",
    ]


# The report -----------------------------------------------------------------------------------------------------------


def test_a_report_begins_with_the_explanation(ledger: Ledger) -> None:
    """Found by any process of the program that has the ledger open."""
    with crew(ledger, "waits", "loads", "waits") as processes:
        sentence = "ranks 0, 2 wait in all_reduce #118 (train.py:40); rank 1 waits for its loader's workers in _loads"
        for pid in (os.getpid(), processes[0].pid):
            text = eventually(lambda pid=pid: report(pid), "loader worker 0 is in Digits.__getitem__")
            assert text.startswith(sentence)
            assert text.count("ranks 0, 2 (pids") == 1
            assert text.count("loader worker 0 (pid") == 1
        assert "without stacks: " in report(os.getpid())
        assert "torchcrew's zygote (" in report(os.getpid())


def test_a_report_of_processes_without_a_ledger_has_their_stacks() -> None:
    ctx = zygote.get_context()
    processes = [ctx.Process(target=time.sleep, args=(60,), name=f"loader worker {number}") for number in range(3)]
    try:
        for process in processes:
            process.start()
        text = eventually(lambda: report(os.getpid()), "loader workers 0, 1, 2 (pids ")
        assert "rank" not in text.split("without stacks")[0]
    finally:
        for process in processes:
            process.kill()
            process.join(10)


def test_a_report_that_cannot_be_made_says_why() -> None:
    with pytest.raises(ProcessLookupError, match="no process"):
        report(2**22 + 1)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        for make in (report, program_report.answers):
            with pytest.raises(ValueError, match="nothing of torchcrew is in process"):
                make(process.pid)
        process.kill()


def test_a_forged_ledger_is_read(ledger: Ledger) -> None:
    """Whatever phase it has; and what it says of calls is printed without control characters."""
    ledger.enter(0, 77)  # type: ignore[arg-type]
    assert ledger.entry(0).phase is Phase.STARTING
    ledger.enter(0, Phase.RUNNING)
    ledger.begin(0, Call("\x1b[2Jall", sequence=1, site="a\nb:1"))
    text = hang.explained([Member(0, 7)], ledger, {7: answered(7, Frame("/u/\x1b.py", 1, "\x9b"))})
    assert text.startswith("rank 0 waits in \\x1b[2Jall #1 (a\\nb:1)\n")
    assert text.replace("\n", "").isprintable()


def test_another_file_of_like_name_is_no_ledger(ledger: Ledger) -> None:
    other = os.memfd_create("torchcrew-ledger2")
    try:
        os.ftruncate(other, os.fstat(ledger._fd).st_size)
        os.pwrite(other, ledger._read(0, 4096), 0)
        assert os.readlink(f"/proc/self/fd/{ledger._fd}") == "/memfd:torchcrew-ledger (deleted)"
        ledger.close()
        assert Ledger.of_process(os.getpid()) is None
    finally:
        os.close(other)


def test_who_waits_for_an_async_collective_is_after_it(ledger: Ledger) -> None:
    """It has ended for the ledger, and its rank waits for those who are behind."""
    for rank, calls in enumerate((2, 2, 1, 0)):
        ledger.enter(rank, Phase.RUNNING)
        for number in range(1, calls + 1):
            ledger.begin(rank, Call("all_reduce", sequence=number, site="a.py:30"))
            ledger.end(rank)
    answers = {pid: answered(pid, Frame("/u/a.py", 30 + (pid > 1), "f")) for pid in range(4)}
    text = hang.explained([Member(rank, rank) for rank in range(4)], ledger, answers)
    assert text.splitlines()[:3] == [
        "ranks 0, 1 are in f (a.py:30) after all_reduce #2; rank 2 is in f (a.py:31) after all_reduce #1; "
        "rank 3 is in f (a.py:31)",
        "behind all_reduce #2: rank 2 (last was in #1); rank 3 (was in none yet)",
        "behind all_reduce #1: rank 3 (was in none yet)",
    ]


def test_the_launching_process_is_one_line_and_a_returned_rank_has_no_stack(ledger: Ledger) -> None:
    package = Path(hang.__file__).parent
    stack = (
        Frame(str(package / "team.py"), 140, "_collect"),
        Frame(str(package / "launching.py"), 5, "launch"),
        Frame("/u/train.py", 30, "main"),
        Frame("/v/bin/torchcrew", 8, "<module>"),
    )
    one = Stacks(7, "the user's process", "sleeps", (Thread(7, "", True, stack),))
    assert hang.stack_lines([one]) == ["the user's process (pid 7) waits for its ranks, in launch (train.py:30)"]
    command = Stacks(7, "the user's process", "sleeps", (Thread(7, "", True, stack[:2] + stack[3:]),))
    assert hang.stack_lines([command]) == ["the user's process (pid 7) waits for its ranks"]
    ledger.enter(0, Phase.RETURNED)
    text = hang.explained([Member(0, 7)], ledger, {7: answered(7, Frame("/u/a.py", 1, "f"))})
    assert text == "rank 0 has returned"


def test_ranks_of_another_host_keep_their_numbers_where_one_has_ended(ledger: Ledger) -> None:
    for rank in range(4):
        ledger.set_pid(rank, 100 + rank)
    found = {100 + rank: Stacks(100 + rank, f"rank {4 + rank}") for rank in (1, 2, 3)}
    assert program_report._first(ledger, found) == 4
    assert program_report._first(ledger, {101: Stacks(101, "rank 0")}) == 0  # forged
