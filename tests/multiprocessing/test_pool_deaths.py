"""Workers of a `Pool` that die: which task fails, what the error says, and that no other task is lost or done twice.

`test_fault_table` has every way to end at every moment that user code can choose, in every start method. Here are the
moments between two instructions of the worker itself, the starts that fail, and kills at random.
"""

from __future__ import annotations

import concurrent.futures.process
import ctypes
import mmap
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchcrew.multiprocessing as mp
from tests.multiprocessing import pool_cases as cases
from tests.multiprocessing.test_pool import DEADLINE, collect, pool_of, wait_for
from torchcrew.errors import PoolBroken, TorchcrewError, WorkerDied
from torchcrew.multiprocessing import pool_worker

pytestmark = pytest.mark.filterwarnings("ignore:fork of a process with:RuntimeWarning")

SQUARES = [number * number for number in range(50)]


def squares(pool: Any) -> list[int]:
    found: list[int] = pool.map_async(cases.square, range(50), 1).get(DEADLINE)
    return found


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_error_says_who_died_and_how() -> None:
    """Which process, its signal or exit code, what it did; in the class hierarchy of those that users catch."""
    with pool_of(1) as pool:
        pid = pool._pool[0].pid
        with pytest.raises(WorkerDied, match=f"pid {pid}.* was killed by SIGKILL while it ran end_at_three") as caught:
            pool.apply_async(cases.end_at_three, (3,)).get(DEADLINE)
        assert (caught.value.pid, caught.value.exitcode) == (pid, -signal.SIGKILL)
        assert isinstance(caught.value, (TorchcrewError, concurrent.futures.process.BrokenProcessPool))
        copy = pickle.loads(pickle.dumps(caught.value))
        assert (copy.args, copy.pid, copy.exitcode) == (caught.value.args, pid, -signal.SIGKILL)
        with pytest.raises(WorkerDied, match="ended with exit code 3 while it ran end_at_three"):
            pool.apply_async(cases.end_at_three, (3, "exit")).get(DEADLINE)
        assert squares(pool) == SQUARES


def test_imap_has_the_error_at_its_place() -> None:
    """All other items are there."""
    with pool_of(2) as pool:
        found = collect(pool.imap(cases.end_at_three, range(8)))
        assert found[:3] + found[4:] == [0, 1, 2, 4, 5, 6, 7]
        assert found[3][0] is WorkerDied
        unordered = collect(pool.imap_unordered(cases.end_at_three, range(8)))
        assert sorted(item for item in unordered if isinstance(item, int)) == [0, 1, 2, 4, 5, 6, 7]
        assert [item[0] for item in unordered if not isinstance(item, int)] == [WorkerDied]


def test_a_chunk_is_lost_and_no_other(tmp_path: Path) -> None:
    """`map` raises when all the rest is done; the error names the user's function, not the library's."""
    errors: list[Any] = []
    with pool_of(2) as pool:
        result = pool.map_async(cases.end_in_chunk, range(100), 10, error_callback=errors.append)
        with pytest.raises(WorkerDied, match="while it ran end_in_chunk, task 4"):
            result.get(DEADLINE)
        assert [type(error) for error in errors] == [WorkerDied]
        noted = pool.starmap_async(cases.note, [(str(tmp_path), number) for number in range(20)], 1)
        assert noted.get(DEADLINE) == list(range(20))
    assert len(list(tmp_path.iterdir())) == 20


def test_many_deaths_in_a_row() -> None:
    """Every task fails by itself."""
    with pool_of(2) as pool:
        results = [pool.apply_async(cases.end_at_three, (3,)) for _ in range(20)]
        for result in results:
            with pytest.raises(WorkerDied):
                result.get(DEADLINE)
        assert squares(pool) == SQUARES


def test_idle_workers_that_are_killed() -> None:
    """All of them, again and again: others come, nothing is lost."""
    with pool_of(3) as pool:
        for _ in range(5):
            assert squares(pool) == SQUARES
            for process in list(pool._pool):
                process.kill()
        assert squares(pool) == SQUARES


def test_deaths_while_it_closes() -> None:
    """A pool that was closed still does what it has, with new workers."""
    with pool_of(2) as pool:
        results = [pool.apply_async(cases.end_at_three, (number,)) for number in (3, 3, 3, 1, 2)]
        pool.close()
        pool.join()
        assert [result.successful() for result in results] == [False, False, False, True, True]


# The moments of a worker's own ---------------------------------------------------------------------------------------


def before_taking(at_first: Callable[[], None]) -> Callable[..., Any]:
    receive = pool_worker.receive_packet

    def patched(*args: Any, **options: Any) -> Any:
        at_first()
        return receive(*args, **options)

    return patched


def after_taking(at_first: Callable[[], None]) -> Callable[..., Any]:
    receive = pool_worker.receive_packet

    def patched(*args: Any, **options: Any) -> Any:
        received = receive(*args, **options)
        if received is not None:
            at_first()
        return received

    return patched


def after_announcing(at_first: Callable[[], None]) -> Callable[..., Any]:
    do = pool_worker._Worker._do

    def patched(worker: Any, received: Any) -> Any:
        at_first()
        return do(worker, received)

    return patched


def before_sending(at_first: Callable[[], None]) -> Callable[..., Any]:
    send = pool_worker._Worker._send

    def patched(worker: Any, number: int, envelope: Any) -> None:
        at_first()
        send(worker, number, envelope)

    return patched


def after_sending(at_first: Callable[[], None]) -> Callable[..., Any]:
    send = pool_worker._Worker._send

    def patched(worker: Any, number: int, envelope: Any) -> None:
        send(worker, number, envelope)
        at_first()

    return patched


#: Where a worker is killed: what to patch, how, and what becomes of the task: calls of it, errors.
MOMENTS: dict[str, tuple[Any, str, Callable[..., Any], tuple[int, int]]] = {
    "before it takes a task": (pool_worker, "receive_packet", before_taking, (1, 0)),
    "received, not announced": (pool_worker, "receive_packet", after_taking, (1, 0)),
    "announced, not begun": (pool_worker._Worker, "_do", after_announcing, (0, 1)),
    "done, result not sent": (pool_worker._Worker, "_send", before_sending, (1, 1)),
    "result sent": (pool_worker._Worker, "_send", after_sending, (1, 0)),
}


@pytest.mark.parametrize("nbytes", [10, 200_000])
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_between_two_instructions(
    moment: str, nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One task fails if it was begun, or may have been; it is done again only if it was not."""
    owner, name, patch, (calls, errors) = MOMENTS[moment]
    flag = str(tmp_path / "flag")
    monkeypatch.setattr(owner, name, patch(lambda: kill_self() if cases.first(flag) else None))
    folder = tmp_path / "notes"
    folder.mkdir()
    ballast = torch.zeros(nbytes, dtype=torch.uint8), b"x" * nbytes
    with pool_of(2) as pool:
        tasks = [(str(folder), number, *ballast) for number in range(20)]
        found = collect(pool.imap(cases.note_with, tasks))
    failed = [number for number, item in enumerate(found) if not isinstance(item, int)]
    assert len(failed) == errors
    assert [number for number, item in enumerate(found) if item == number] == sorted(set(range(20)) - set(failed))
    noted = [int(path.name.partition("-")[0]) for path in folder.iterdir()]
    assert [noted.count(number) for number in range(20)] == [calls if n in failed else 1 for n in range(20)]


def test_killed_while_another_is_between_two_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a living worker has received and not yet announced is not taken for lost."""
    slow, dead = (str(tmp_path / name) for name in ("slow", "dead"))

    def at_first() -> None:
        if cases.first(slow):
            time.sleep(0.5)
        elif cases.first(dead):
            kill_self()

    monkeypatch.setattr(pool_worker, "receive_packet", after_taking(at_first))
    folder = tmp_path / "notes"
    folder.mkdir()
    with pool_of(2) as pool:
        tasks = [(str(folder), number) for number in range(10)]
        assert pool.starmap_async(cases.note, tasks, 1).get(DEADLINE) == list(range(10))
        pool.close()
        pool.join()
    assert sorted(path.name.partition("-")[0] for path in folder.iterdir()) == [str(number) for number in range(10)]


def test_hundreds_of_descriptors_are_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that was lost before it began may have more descriptors than one packet takes."""
    flag = str(tmp_path / "flag")
    kill_first = after_taking(lambda: kill_self() if cases.first(flag) else None)
    monkeypatch.setattr(pool_worker, "receive_packet", kill_first)
    with pool_of(1) as pool:
        tensors = pool.apply_async(cases.identity, (cases.many_tensors(300),)).get(DEADLINE)
        assert [tensor[0].item() for tensor in tensors] == list(range(300))
    assert os.path.exists(flag)


def test_a_stopped_worker_delays_nobody_else(tmp_path: Path) -> None:
    """A worker that is stopped in a task keeps that task; another that dies meanwhile does not wait for it."""
    with pool_of(2) as pool:
        slow = pool.apply_async(cases.say_and_sleep, (str(tmp_path / "running"), 0.01))
        wait_for(tmp_path / "running")
        pids = [process.pid for process in pool._pool]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        os.kill(pids[0], signal.SIGKILL)
        assert squares(pool) == SQUARES
        os.kill(pids[1], signal.SIGCONT)
        slow.wait(DEADLINE)
        assert slow.ready()


def test_killed_while_the_results_are_full() -> None:
    """A worker that sends into a full socket, because the user's callback takes long, dies like any other."""
    release = threading.Event()
    with pool_of(2) as pool:
        pool.apply_async(cases.square, (1,), callback=lambda _: release.wait(DEADLINE))
        results = [pool.apply_async(cases.identity, (bytes(40_000),)) for _ in range(40)]
        time.sleep(0.3)
        for process in list(pool._pool):
            process.kill()
        time.sleep(0.1)
        release.set()
        for result in results:
            result.wait(DEADLINE)
        failed = [result for result in results if not result.successful()]
        assert len(failed) <= 2
        for result in failed:
            with pytest.raises(WorkerDied):
                result.get(0)


def test_terminated_while_the_results_are_full() -> None:
    """In the callback itself: the thread that would report the dead workers is not waited for in vain."""
    done = threading.Event()
    with pool_of(2) as pool:

        def end(_: Any) -> None:
            while pool._crew.ledger._mark(b""):
                pass
            for process in list(pool._pool):
                process.kill()
            time.sleep(0.2)
            pool.terminate()
            done.set()

        pool.apply_async(cases.square, (1,), callback=end)
        results = [pool.apply_async(cases.square, (2,)) for _ in range(40)]
        assert done.wait(DEADLINE)
        for result in results:
            with pytest.raises(PoolBroken):
                result.get(DEADLINE)


# Starts that fail ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "zygote"])
def test_an_initializer_that_raises(method: str) -> None:
    """Fails every task, those that come later too, with its error as the cause; stock starts workers for ever."""
    with pool_of(2, method, initializer=cases.raise_in_initializer, initargs=("no disk",)) as pool:
        for call in (lambda: pool.apply_async(cases.square, (1,)), lambda: pool.map_async(cases.square, range(9))):
            with pytest.raises(PoolBroken, match="its initializer raised") as caught:
                call().get(DEADLINE)
            assert isinstance(caught.value.__cause__, ValueError)
            assert caught.value.__cause__.args == ("no disk",)
            assert "raise ValueError(text)" in str(caught.value.__cause__.__cause__)
        endless = iter(int, 1)
        assert [item[0] for item in collect(pool.imap(cases.square, endless))] == [PoolBroken]
        pool.close()
        pool.join()
    assert mp.active_children() == []


@pytest.mark.parametrize("how", ["exit", "C exit", "SIGKILL"])
def test_an_initializer_that_dies(how: str) -> None:
    """The same; the error says how the last worker ended."""
    text = "SIGKILL" if how == "SIGKILL" else "exit code 3"
    with (
        pool_of(2, initializer=cases.end_in_initializer, initargs=(how,)) as pool,
        pytest.raises(PoolBroken, match=text),
    ):
        pool.apply_async(cases.square, (1,)).get(DEADLINE)


@pytest.mark.parametrize("how", ["exception", "SIGKILL"])
def test_an_initializer_that_fails_once(how: str, tmp_path: Path) -> None:
    """Is tried again, as with stock."""
    with pool_of(2, initializer=cases.end_at_first, initargs=(str(tmp_path / "flag"), how)) as pool:
        assert squares(pool) == SQUARES


def test_a_start_that_fails_later() -> None:
    """A process that cannot be started any more breaks the pool when no worker is left, with the error as the cause."""
    fork: Any = mp.get_context("fork")

    class Context:
        process = fork.Process

        @classmethod
        def Process(cls, **options: Any) -> Any:
            return cls.process(**options)

    def fail(**_: Any) -> Any:
        raise OSError("no more processes")

    with pool_of(1, Context) as pool:
        assert squares(pool) == SQUARES
        Context.process = fail
        result = pool.apply_async(cases.end_at_three, (3,))
        with pytest.raises(WorkerDied):
            result.get(DEADLINE)
        with pytest.raises(PoolBroken, match="no more processes") as caught:
            pool.apply_async(cases.square, (1,)).get(DEADLINE)
        assert isinstance(caught.value.__cause__, OSError)


# At random -----------------------------------------------------------------------------------------------------------


class Killer(threading.Thread):
    """Kills a worker now and then."""

    def __init__(self, pool: Any, seconds: float, seed: int) -> None:
        super().__init__()
        self.pool, self.seconds = pool, seconds
        self.random = random.Random(seed)
        self.kills = 0
        self.ended = False

    def run(self) -> None:
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            time.sleep(self.random.expovariate(1 / 0.008))
            workers = list(self.pool._pool)
            if workers:
                process = self.random.choice(workers)
                if process.exitcode is None:
                    process.kill()
                    self.kills += 1
        self.ended = True


def run_with_kills(seconds: float, seed: int) -> tuple[int, int]:
    """Rounds of tasks while workers are killed; returns kills and tasks that failed."""
    size = 400
    memory = mmap.mmap(-1, 8 * size)
    counts = (ctypes.c_int64 * size).from_buffer(memory)
    failed = 0
    with pool_of(3, initializer=cases.remember, initargs=(counts,)) as pool:
        killer = Killer(pool, seconds, seed)
        killer.start()
        try:
            while not killer.ended:
                ctypes.memset(counts, 0, 8 * size)
                results = collect(pool.imap(cases.count_call, range(size)))
                assert len(results) == size
                for number, (item, calls) in enumerate(zip(results, counts, strict=True)):
                    if isinstance(item, int):
                        assert (item, calls) == (number, 1)
                    else:
                        assert item[0] is WorkerDied
                        assert calls <= 1
                        failed += 1
                assert failed <= killer.kills
        finally:
            killer.join()
        assert squares(pool) == SQUARES
        pool.close()
        pool.join()
    return killer.kills, failed


def test_random_kills() -> None:
    """Every task has its result, or fails because its worker died; none is done twice."""
    kills, _ = run_with_kills(4.0, seed=1)
    assert kills > 20


@pytest.mark.faults
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(2, 7))
def test_random_kills_for_long(seed: int) -> None:
    """The same, hundreds of times."""
    run_with_kills(60.0, seed)
