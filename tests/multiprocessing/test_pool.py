"""`Pool` does what the standard library's does, shares tensors, and ends in every way it can be ended."""

from __future__ import annotations

import contextlib
import gc
import inspect
import multiprocessing.pool
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchcrew.multiprocessing as mp
from tests.multiprocessing import pool_cases as cases
from torchcrew.errors import PoolBroken
from torchcrew.multiprocessing.pool import Pool, ThreadPool

METHODS = ("fork", "spawn", "forkserver", "zygote")
#: Long beside anything that happens here, and shorter than the test's own deadline.
DEADLINE = 10
ROOT = Path(__file__).parents[2]

# The thread that it finds is faulthandler's, which prints the stacks of a test that hangs.
pytestmark = pytest.mark.filterwarnings("ignore:fork of a process with:RuntimeWarning")


@contextlib.contextmanager
def pool_of(processes: int = 2, context: Any = "fork", **options: Any) -> Iterator[Any]:
    """A pool that is gone afterwards; ``context`` may be the name of a start method."""
    pool = Pool(processes, context=mp.get_context(context) if isinstance(context, str) else context, **options)
    try:
        yield pool
    finally:
        pool.terminate()
        pool.join()


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    """One pool for the tests that leave it as it was."""
    with pool_of(2) as made:
        yield made


@pytest.fixture(scope="module")
def stock() -> Iterator[Any]:
    """The standard library's."""
    with multiprocessing.get_context("fork").Pool(2) as made:
        yield made
    made.join()


def wait_for(path: Path) -> None:
    """Until there is such a file."""
    deadline = time.monotonic() + DEADLINE
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def outcome(call: Callable[[Any], Any], pool: Any) -> Any:
    """What a call returns, or what it raises and with what cause."""
    try:
        return call(pool)
    except Exception as error:
        return type(error), error.args, type(error.__cause__)


def callbacks(pool: Any, func: Any) -> tuple[list[Any], list[str]]:
    done: list[Any] = []
    failed: list[str] = []
    result = pool.map_async(func, range(5), 2, done.append, lambda error: failed.append(repr(error)))
    result.wait(DEADLINE)
    return done, failed


def breaking(at: int) -> Iterator[int]:
    yield from range(at)
    raise RuntimeError("the iterable broke")


def collect(iterator: Any) -> list[Any]:
    """Everything that an iterator gives, errors at their places."""
    found: list[Any] = []
    while True:
        try:
            found.append(next(iterator))
        except StopIteration:
            return found
        except Exception as error:
            found.append((type(error), error.args))


CALLS: dict[str, Callable[[Any], Any]] = {
    "apply": lambda pool: pool.apply(cases.add, (1,), {"other": 2}),
    "apply_async": lambda pool: pool.apply_async(cases.square, (3,)).get(DEADLINE),
    "apply that raises": lambda pool: pool.apply(cases.fail, (3,)),
    "map": lambda pool: pool.map(cases.square, range(100)),
    "map in chunks": lambda pool: pool.map(cases.square, range(100), 7),
    "map of nothing": lambda pool: pool.map(cases.square, []),
    "map of nothing in chunks": lambda pool: pool.map_async(cases.square, [], 1).get(DEADLINE),
    "map of a generator": lambda pool: pool.map(cases.square, iter(range(10))),
    "map that raises": lambda pool: pool.map(cases.fail_at_three, range(10), 2),
    "map over what breaks": lambda pool: pool.map(cases.square, breaking(3)),
    "map, negative chunks": lambda pool: pool.map(cases.square, range(4), -1),
    "starmap": lambda pool: pool.starmap(cases.add, [(1, 2), (3, 4)]),
    "starmap_async": lambda pool: pool.starmap_async(cases.add, [(1, 2), (3,)]).get(DEADLINE),
    "imap": lambda pool: collect(pool.imap(cases.square, range(100))),
    "imap in chunks": lambda pool: collect(pool.imap(cases.square, range(100), 7)),
    "imap that raises": lambda pool: collect(pool.imap(cases.fail_at_three, range(6))),
    "imap over what breaks": lambda pool: collect(pool.imap(cases.square, breaking(3))),
    "imap over what breaks at once": lambda pool: collect(pool.imap(cases.square, breaking(0))),
    "imap of nothing": lambda pool: collect(pool.imap(cases.square, [])),
    "imap, chunks of 0": lambda pool: pool.imap(cases.square, range(4), 0),
    "imap_unordered": lambda pool: sorted(pool.imap_unordered(cases.square, range(100))),
    "imap_unordered in chunks": lambda pool: sorted(pool.imap_unordered(cases.square, range(100), 7)),
    "imap_unordered, chunks of 0": lambda pool: pool.imap_unordered(cases.square, range(4), 0),
    "callback": lambda pool: callbacks(pool, cases.square),
    "error callback": lambda pool: callbacks(pool, cases.fail_at_three),
    "too early": lambda pool: pool.apply_async(time.sleep, (0.2,)).get(0.01),
    "an argument that cannot be pickled": lambda pool: pool.apply(cases.identity, (threading.Lock(),)),
    "a function that cannot be pickled": lambda pool: pool.map(lambda number: number, range(4)),
    "a result that cannot be pickled": lambda pool: outcome(lambda p: p.apply(cases.a_lambda, (1,)), pool)[0],
    "a large argument and result": lambda pool: pool.apply(cases.identity, (b"x" * 3_000_000,)),
    "a connection": lambda pool: connection_through(pool),
    "join while it runs": lambda pool: pool.join(),
    "pickling it": lambda pool: pickle.dumps(pool),
}


def connection_through(pool: Any) -> Any:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        with pool.apply(cases.identity, (theirs,)) as back:
            back.send("through")
        return ours.recv()


@pytest.mark.parametrize("call", CALLS)
def test_as_stock(call: str, pool: Any, stock: Any) -> None:
    """Same results, errors and causes as the standard library's."""
    assert outcome(CALLS[call], pool) == outcome(CALLS[call], stock)


@pytest.mark.parametrize("options", [{"processes": 0}, {"processes": -1}, {"maxtasksperchild": 0}, {"initializer": 1}])
def test_arguments_as_stock(options: dict[str, Any]) -> None:
    """Arguments that make no sense are refused in the same words."""
    errors = []
    for kind in (Pool, multiprocessing.pool.Pool):
        with pytest.raises((ValueError, TypeError)) as caught:
            kind(**options)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


def test_signatures_are_stocks() -> None:
    """Every public method takes what stock's takes."""
    for name in ("__init__", *(name for name in dir(multiprocessing.pool.Pool) if not name.startswith("_"))):
        ours, stock = (inspect.signature(getattr(kind, name)) for kind in (Pool, multiprocessing.pool.Pool))
        assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
            (p.name, p.kind, p.default) for p in stock.parameters.values()
        ]
    assert issubclass(Pool, multiprocessing.pool.Pool)
    assert ThreadPool is multiprocessing.pool.ThreadPool
    assert mp.pool.MaybeEncodingError is multiprocessing.pool.MaybeEncodingError


@pytest.mark.parametrize("method", METHODS)
def test_every_start_method(method: str) -> None:
    """The initializer runs with its arguments, and tensors are shared both ways."""
    with pool_of(2, method, initializer=cases.remember, initargs=(torch.ones(2),)) as pool:
        assert torch.equal(pool.apply(cases.recall, (0,)), torch.ones(2))
        tensor = torch.zeros(5)
        assert pool.apply(cases.fill, (tensor, 7.0))
        assert tensor.is_shared()
        assert tensor.tolist() == [7.0] * 5
        base, tail = pool.apply(cases.two_views, (4,))
        base[1] = 30
        assert tail.tolist() == [30, 2, 3]
        pool.close()
        pool.join()
    assert base.tolist() == [0, 30, 2, 3]  # who made it is gone


@pytest.mark.parametrize("context", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.faults)])
@pytest.mark.leaks_allowed(reason="the fork server and the tracker of resources stay, by stock's design")
def test_stocks_contexts(context: str) -> None:
    """A context of the standard library does, too."""
    with Pool(1, context=multiprocessing.get_context(context)) as pool:
        assert pool.map(cases.square, range(5)) == [0, 1, 4, 9, 16]
        pool.close()
        pool.join()


def test_more_tensors_than_one_packet_carries(pool: Any) -> None:
    """Hundreds of storages in one argument and one result."""
    tensors = pool.apply(cases.identity, (cases.many_tensors(300),))
    assert [tensor[0].item() for tensor in tensors] == list(range(300))


def test_too_few_descriptors_in_a_worker() -> None:
    """A task whose tensors the worker cannot receive fails; the worker goes on."""
    with pool_of(1, initializer=cases.few_descriptors) as pool:
        with pytest.raises(OSError, match="descriptor"):
            pool.apply_async(cases.identity, (cases.many_tensors(200),)).get(DEADLINE)
        with pytest.raises((OSError, multiprocessing.pool.MaybeEncodingError)):
            pool.apply_async(cases.many_tensors, (200,)).get(DEADLINE)
        assert pool.apply_async(cases.square, (3,)).get(DEADLINE) == 9


def test_the_traceback_is_the_cause(pool: Any) -> None:
    """The worker's traceback comes with the error."""
    with pytest.raises(KeyError) as caught:
        pool.apply(cases.fail, (3,))
    assert "raise KeyError(number)" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda pool: pool.apply_async(cases.raise_stubborn, (0,)), TypeError),
        (lambda pool: pool.apply_async(cases.identity, (cases.Unloadable(),)), ValueError),
    ],
)
def test_what_cannot_be_unpickled(pool: Any, call: Any, error: type[Exception]) -> None:
    """Fails its task on either side; stock hangs."""
    with pytest.raises(error):
        call(pool).get(DEADLINE)
    assert pool.apply(cases.square, (3,)) == 9


def test_a_callback_that_raises(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is shown, the result is there, and so are all later ones; stock hangs."""
    shown: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: shown.append(args.exc_type))
    for call in (pool.apply_async, pool.map_async):
        arguments: Any = (3,) if call == pool.apply_async else range(3)
        assert call(cases.square, arguments, callback=lambda _: {}["missing"]).get(DEADLINE) in (9, [0, 1, 4])
    assert pool.apply(cases.square, (4,)) == 16
    assert shown == [KeyError, KeyError]


class Promising:
    """An iterable with fewer items than its length."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[int]:
        return iter(range(2))


def test_an_iterable_shorter_than_its_length(pool: Any) -> None:
    """Is an error; stock hangs."""
    with pytest.raises(ValueError, match="fewer items"):
        pool.map_async(cases.square, Promising(), 1).get(DEADLINE)


class Breaking(Promising):
    def __iter__(self) -> Iterator[int]:
        yield 1
        raise SystemExit("not an Exception")


def test_an_iterable_that_exits(pool: Any) -> None:
    """Ends its map and nothing else."""
    with pytest.raises(SystemExit):
        pool.map_async(cases.square, Breaking(), 1).get(DEADLINE)
    with pytest.raises(SystemExit):
        list(pool.imap(cases.square, Breaking()))
    assert pool.apply(cases.square, (3,)) == 9


def test_a_task_that_forks(pool: Any) -> None:
    """The child that comes back from the task is no second worker."""
    pid = pool.apply_async(cases.fork_and_return, (0,)).get(DEADLINE)
    assert pid > 0
    assert pool.map(cases.square, range(50), 1) == [n * n for n in range(50)]


def test_no_task_waits_behind_another() -> None:
    """A worker takes one task at a time: tasks that need each other run side by side."""
    with pool_of(2) as pool:
        slow = pool.apply_async(time.sleep, (30,))
        assert pool.map_async(cases.square, range(20), 1).get(DEADLINE) == [n * n for n in range(20)]
        assert not slow.ready()


def test_maxtasksperchild() -> None:
    """Workers are replaced, and leave no descriptor behind."""
    with pool_of(2, maxtasksperchild=1) as pool:
        pids = pool.map(cases.pid_after, [0.0] * 6, 1)
        before = len(os.listdir("/proc/self/fd"))
        pids += pool.map(cases.pid_after, [0.0] * 14, 1)
        assert len(set(pids)) == 20
        assert len(os.listdir("/proc/self/fd")) <= before + 8


def test_more_workers_later() -> None:
    """The way in which people make a pool larger."""
    with pool_of(1) as pool:
        pool._processes = 3
        pool._repopulate_pool()
        assert len(pool._pool) == 3
        assert len(set(pool.map(cases.pid_after, [0.2] * 3, 1))) == 3


def test_several_threads(pool: Any) -> None:
    """Each gets its own results."""
    found: dict[int, list[int]] = {}

    def use(number: int) -> None:
        found[number] = [pool.apply(cases.add, (number, other)) for other in range(50)]
        found[number] += pool.imap(cases.square, range(50))

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    squares = [n * n for n in range(50)]
    assert found == {number: [number + other for other in range(50)] + squares for number in range(4)}


def test_terminate_with_tasks_running() -> None:
    """Ends at once, whoever waits gets an error, callbacks are not called."""
    called: list[Any] = []
    with pool_of(2) as pool:
        running = pool.map_async(time.sleep, [60] * 1000, 1, called.append, called.append)
        iterator = pool.imap(time.sleep, [60] * 4)
        waiting = threading.Thread(target=lambda: called.append(outcome(lambda _: next(iterator), pool)[0]))
        waiting.start()
    waiting.join(DEADLINE)
    with pytest.raises(PoolBroken, match="terminated"):
        running.get(DEADLINE)
    assert called == [PoolBroken]
    with pytest.raises(ValueError, match="not running"):
        pool.map(cases.square, [1])


def test_terminate_while_the_iterable_blocks() -> None:
    """Does not wait for the user's iterable; stock does."""
    release, inside = threading.Event(), threading.Event()

    def blocking() -> Iterator[int]:
        yield 1
        inside.set()
        release.wait(DEADLINE)
        yield 2

    with pool_of(1) as pool:
        results = pool.imap(cases.square, blocking())
        assert next(results) == 1
        assert inside.wait(DEADLINE)
        pool.terminate()
        pool.join()
        assert not release.is_set()
        release.set()
        pool._task_handler.join(DEADLINE)


def test_terminate_in_a_callback() -> None:
    """The thread that calls back does not wait for itself."""
    with pool_of(2) as pool:
        done = threading.Event()

        def end(_: Any) -> None:
            pool.terminate()
            done.set()

        pool.apply_async(cases.square, (1,), callback=end)
        assert done.wait(DEADLINE)
        pool.join()


def test_a_worker_that_ignores_sigterm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Is killed."""
    monkeypatch.setattr("torchcrew.multiprocessing.pool_crew._TERM_DEADLINE", 0.2)
    with pool_of(1, initializer=cases.ignore_sigterm) as pool:
        pool.apply_async(cases.say_and_sleep, (str(tmp_path / "running"),))
        wait_for(tmp_path / "running")
        process = pool._pool[0]
    assert process.exitcode == -signal.SIGKILL


def test_a_pool_is_gone_without_the_collector() -> None:
    """With its last reference go its workers' descriptors: nothing refers to it in a circle."""
    gc.collect()
    gc.disable()
    try:
        with mp.Pool(2) as pool:
            assert pool.map(abs, [-1]) == [1]
        before = len(os.listdir("/proc/self/fd"))
        del pool
        assert len(os.listdir("/proc/self/fd")) < before
    finally:
        gc.enable()


def test_close_ends_the_workers_without_join() -> None:
    """All that was asked for is done; then workers and threads end by themselves."""
    with pool_of(2) as pool:
        result = pool.map_async(cases.pid_after, [0.05] * 6, 1)
        threads = [pool._worker_handler, pool._task_handler, pool._result_handler]
        processes = list(pool._pool)
        pool.close()
        pool.close()
        assert len(result.get(DEADLINE)) == 6
        for end in (*threads, *processes):
            end.join(DEADLINE)
        assert [process.exitcode for process in processes] == [0, 0]
        assert not any(thread.is_alive() for thread in threads)


def test_a_pool_that_is_forgotten() -> None:
    """Warns, and ends its workers."""
    pool = mp.get_context("fork").Pool(1)
    process = pool._pool[0]
    everything = [pool]
    del pool
    with pytest.warns(ResourceWarning, match="unclosed running"):
        everything.clear()
    gc.collect()
    process.join(DEADLINE)
    assert process.exitcode is not None


def test_a_forked_child_cannot_use_it(pool: Any) -> None:
    """Says so, instead of waiting for ever; closing it there does not close it here."""
    pid = os.fork()
    if pid == 0:
        try:
            pool.apply(cases.square, (3,))
        except ValueError as error:
            pool.close()
            pool.terminate()
            os._exit(str(os.getppid()) in str(error))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert pool.apply(cases.square, (3,)) == 9


def test_in_a_worker(pool: Any, stock: Any) -> None:
    """Daemonic processes have no children, as with stock; nothing is left of the attempt."""

    def call(pool: Any) -> Any:
        return pool.apply(cases.make_pool, (0,))

    assert outcome(call, pool) == outcome(call, stock)
    assert outcome(call, pool)[0] is AssertionError


def test_a_start_that_fails() -> None:
    """The error of the start, and the workers that were started are gone."""

    class Failing:
        started = 0

        @classmethod
        def Process(cls, **options: Any) -> Any:
            process: Any = mp.get_context("fork").Process(**options)
            cls.started += 1
            if cls.started == 3:
                process.start = lambda: 1 / 0
            return process

    before = set(mp.active_children())
    with pytest.raises(ZeroDivisionError):
        Pool(4, context=Failing)
    assert set(mp.active_children()) == before


def test_ctrl_c_prints_one_traceback() -> None:
    """The terminal's SIGINT goes to the workers, too: they say nothing, and all end."""
    command = [sys.executable, "-m", "tests.multiprocessing.pool_cases"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        time.sleep(0.1)
        os.killpg(program.pid, signal.SIGINT)
        _, errors = program.communicate(timeout=DEADLINE)
    assert errors.count("Traceback") == 1
    assert errors.rstrip().endswith("KeyboardInterrupt")


def test_at_exit() -> None:
    """A program that leaves its pool to the interpreter ends without a word."""
    code = "import torchcrew.multiprocessing as mp; pool = mp.Pool(2); print(pool.map(abs, [-1]))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=15, check=True)
    assert (run.stdout, run.stderr) == ("[1]\n", "")
