"""Queues: stock's classes and semantics, tensors that are shared, no thread in the usual case."""

from __future__ import annotations

import collections
import concurrent.futures
import errno
import inspect
import multiprocessing
import os
import pickle
import queue as stdlib_queue
import threading
import time
from multiprocessing import connection, pool
from multiprocessing import queues as stock
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchcrew.multiprocessing as mp
from tests.multiprocessing import queue_cases as cases
from torchcrew.multiprocessing import queues
from torchcrew.testing.crash import run_program

METHODS = ("fork", "spawn", "forkserver", "zygote")
KINDS = ("Queue", "JoinableQueue", "SimpleQueue")
FORK: Any = mp.get_context("fork")

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("_zygote_ends")]


@pytest.fixture(params=[*METHODS, "stock fork"])
def context(request: pytest.FixtureRequest) -> Any:
    """Our contexts, and one of the standard library's, which knows nothing of our queues."""
    kind, _, method = request.param.rpartition(" ")
    return (multiprocessing if kind else mp).get_context(method)


def make(kind: str, context: Any = FORK, *args: Any) -> Any:
    return getattr(queues, kind)(*args, ctx=context)


def ended(process: Any) -> int | None:
    """Join a process; its exit code."""
    process.join(20)
    code: int | None = process.exitcode
    process.close()
    return code


# Names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_queues_are_of_stocks_classes(kind: str) -> None:
    """isinstance checks of others hold, and every method takes what stock's takes."""
    ours, theirs = getattr(queues, kind), getattr(stock, kind)
    assert issubclass(ours, theirs)
    assert type(getattr(FORK, kind)()) is ours
    for name, function in inspect.getmembers(theirs, inspect.isfunction):
        if not name.startswith("_"):
            assert (
                inspect.signature(getattr(ours, name)).parameters.keys()
                == inspect.signature(function).parameters.keys()
            ), name
    with pytest.raises(TypeError):
        ours()
    queue = make(kind)
    assert queue._reader.fileno() != queue._writer.fileno()
    assert isinstance(queue._reader, connection.Connection)


def test_maxsize_must_be_a_number() -> None:
    """As with stock."""
    with pytest.raises(TypeError):
        queues.Queue("10", ctx=FORK)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_pickles_only_while_a_process_starts(kind: str) -> None:
    """Stock's error, with the name of the class."""
    with pytest.raises(RuntimeError, match=rf"{kind} objects should only be shared between processes"):
        pickle.dumps(make(kind))
    with pytest.raises(RuntimeError, match="should only be shared"):
        make("SimpleQueue").put(make(kind))


# Between processes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(context: Any, kind: str) -> None:
    """Objects of all sizes come back as they were, in order; a tensor comes back as itself."""
    there, back = make(kind, context), make(kind, context)
    process = context.Process(target=cases.echo, args=(there, back))
    process.start()
    items = [1, "x" * 100_000, b"y" * 5_000_000, {"a": [1, 2]}, np.arange(1000), (), [None], "", float("inf")]
    for item in items:
        there.put(item)
    for item in items:
        got = back.get()
        assert type(got) is type(item)
        assert np.array_equal(got, item) if isinstance(item, np.ndarray) else got == item
    tensor = torch.arange(5.0)
    there.put(tensor)
    returned = back.get()
    assert returned.data_ptr() == tensor.data_ptr()
    there.put(None)
    assert ended(process) == 0
    assert back.empty()


def test_both_sides_see_writes(context: Any) -> None:
    """The tensor that was put is shared from then on."""
    there, back = make("Queue", context), make("SimpleQueue", context)
    process = context.Process(target=cases.add_one, args=(there, back))
    process.start()
    tensor, parameter = torch.zeros(100), torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    rows = tensor[10:20]
    for item in (tensor, rows, parameter):
        there.put(item)
    assert [back.get() for _ in range(3)] == ["added"] * 3
    assert tensor.is_shared()
    assert tensor.sum() == 110
    assert (rows == 2).all()
    assert (parameter == 1).all()
    there.put(None)
    assert ended(process) == 0


@pytest.mark.parametrize("kind", ["Queue", "SimpleQueue"])
def test_tensors_survive_their_producer(context: Any, kind: str) -> None:
    """Put, exit, get: the memory is in the message."""
    queue = make(kind, context)
    process = context.Process(target=cases.put_tensors, args=(queue, 5))
    process.start()
    assert ended(process) == 0
    assert [queue.get().mean().item() for _ in range(5)] == [0, 1, 2, 3, 4]


def test_stocks_spawn() -> None:
    """The standard library's own way to start a process hands our queues on, too."""
    context = multiprocessing.get_context("spawn")
    there, back = make("Queue", context), make("SimpleQueue", context)
    process = context.Process(target=cases.echo, args=(there, back))
    process.start()
    tensor = torch.ones(3)
    there.put(tensor)
    assert back.get().data_ptr() == tensor.data_ptr()
    there.put(None)
    assert ended(process) == 0


@pytest.mark.parametrize(
    ("method", "inner"),
    [
        pytest.param(method, inner, marks=() if inner == "fork" or method == "zygote" else pytest.mark.faults)
        for method in METHODS
        for inner in ("fork", "zygote")
    ],
)
def test_a_grandchild_puts(method: str, inner: str) -> None:
    """A queue can be handed on."""
    queue = mp.get_context(method).Queue()
    process = mp.get_context(method).Process(target=cases.put_in_grandchild, args=(queue, inner))
    process.start()
    assert queue.get() == "grandchild"
    assert ended(process) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_many_producers_many_consumers(kind: str) -> None:
    """Each message is received once, and those of one producer in order."""
    queue, results = make(kind), make("SimpleQueue")
    producers = [
        FORK.Process(target=cases.put_all, args=(queue, [(number, index) for index in range(200)]))
        for number in range(3)
    ]
    consumers = [FORK.Process(target=cases.echo, args=(queue, results)) for _ in range(3)]
    for process in (*producers, *consumers):
        process.start()
    received = [results.get() for _ in range(600)]
    assert collections.Counter(received) == collections.Counter((n, i) for n in range(3) for i in range(200))
    for _ in consumers:
        queue.put(None)
    assert [ended(process) for process in (*producers, *consumers)] == [0] * 6


# Sizes, times, closing ------------------------------------------------------------------------------------------------


def test_maxsize() -> None:
    """Full, qsize, full, empty: at once, also those that stock tells a moment later."""
    queue = make("Queue", FORK, 2)
    assert (queue.qsize(), queue.empty(), queue.full()) == (0, True, False)
    queue.put(1)
    assert (queue.qsize(), queue.empty(), queue.full()) == (1, False, False)
    queue.put(2)
    assert (queue.qsize(), queue.full()) == (2, True)
    for attempt in (
        lambda: queue.put_nowait(3),
        lambda: queue.put(3, False),
        lambda: queue.put(3, True, 0.05),
        lambda: queue.put(3, timeout=-1),
    ):
        with pytest.raises(stdlib_queue.Full):
            attempt()
    assert [queue.get_nowait(), queue.get(timeout=1)] == [1, 2]
    for attempt in (queue.get_nowait, lambda: queue.get(False), lambda: queue.get(True, 0.05)):
        with pytest.raises(stdlib_queue.Empty):
            attempt()
    queue.put(4)
    assert queue.get() == 4


def test_put_waits_for_maxsize() -> None:
    """A put at a full queue goes on when something was taken out."""
    queue = make("Queue", FORK, 1)
    queue.put(0)
    putter = threading.Thread(target=lambda: [queue.put(number) for number in range(1, 20)])
    putter.start()
    assert [queue.get(timeout=10) for _ in range(20)] == list(range(20))
    putter.join()


def test_what_is_not_sent_is_not_encoded() -> None:
    """A tensor that finds the queue full stays as it is."""
    queue = make("Queue", FORK, 1)
    queue.put(0)
    tensor = torch.zeros(3)
    with pytest.raises(stdlib_queue.Full):
        queue.put_nowait(tensor)
    assert not tensor.is_shared()


@pytest.mark.parametrize("kind", ["Queue", "JoinableQueue"])
def test_put_never_waits(kind: str) -> None:
    """More than the socket holds goes to a backlog, in order; the feeder exists only then."""
    queue = make(kind)
    queue.put(0)
    assert queue._thread is None
    for index in range(1, cases.MANY):
        queue.put(index)
    assert queue._thread is not None
    assert queue.qsize() == cases.MANY
    assert [queue.get(timeout=10) for _ in range(cases.MANY)] == list(range(cases.MANY))
    deadline = time.monotonic() + 5
    while queue.qsize() and time.monotonic() < deadline:  # the feeder strikes out what it has just sent
        time.sleep(0.001)
    assert queue.qsize() == 0
    queue.close()
    queue.join_thread()
    assert not queue._thread.is_alive()


def test_maxsize_counts_the_backlog() -> None:
    """A bound that the socket does not reach is one all the same."""
    queue = make("Queue", FORK, cases.MANY)
    for index in range(cases.MANY):
        queue.put_nowait(index)
    with pytest.raises(stdlib_queue.Full):
        queue.put_nowait(-1)
    assert queue.full()
    assert [queue.get(timeout=10) for _ in range(cases.MANY)] == list(range(cases.MANY))
    queue.close()
    queue.join_thread()


def test_a_process_ends_when_its_backlog_is_sent(context: Any) -> None:
    """As stock's; `cancel_join_thread` lets it end before."""
    queue = make("Queue", context)
    process = context.Process(target=cases.put_many, args=(queue,))
    process.start()
    process.join(0.5)
    assert process.is_alive()
    assert [queue.get(timeout=20) for _ in range(cases.MANY)] == list(range(cases.MANY))
    assert ended(process) == 0
    process = context.Process(target=cases.put_many_and_leave, args=(queue,))
    process.start()
    assert ended(process) == 0
    assert 0 < queue.qsize() <= cases.MANY


def test_a_forked_child_has_no_backlog() -> None:
    """What the parent has still to send is the parent's."""
    queue = make("Queue")
    for index in range(cases.MANY):
        queue.put(index)
    process = FORK.Process(target=cases.put_all, args=(queue, ["child"]))
    process.start()
    received = [queue.get(timeout=10) for _ in range(cases.MANY + 1)]
    received.remove("child")
    assert received == list(range(cases.MANY))
    assert ended(process) == 0
    queue.close()
    queue.join_thread()


@pytest.mark.parametrize("kind", ["Queue", "JoinableQueue"])
def test_closed(kind: str) -> None:
    """`close` of a queue that was never used closes nothing, as stock's; of another, everything."""
    queue = make(kind)
    queue.close()
    queue.join_thread()
    assert queue.empty()
    queue = make(kind)
    queue.put("foo")
    with pytest.raises(AssertionError, match="not closed"):
        queue.join_thread()
    queue.close()
    queue.close()
    queue.join_thread()
    for attempt in (queue.get, queue.get_nowait, lambda: queue.put(1)):
        with pytest.raises(ValueError, match="is closed"):
            attempt()
    with pytest.raises(OSError, match="is closed"):
        queue.empty()
    assert queue._reader.closed
    assert queue._writer.closed


def test_closed_simple_queue() -> None:
    """As stock's: the pipe's errors."""
    queue = make("SimpleQueue")
    queue.close()
    queue.close()
    for attempt in (queue.get, queue.empty, lambda: queue.put(1)):
        with pytest.raises(OSError, match="is closed"):
            attempt()


def test_simple_queue_ends() -> None:
    """Without a writer `get` ends; without a reader `put` does."""
    queue = make("SimpleQueue")
    queue.put(1)
    queue._writer.close()
    assert queue.get() == 1
    with pytest.raises(EOFError):
        queue.get()
    queue = make("SimpleQueue")
    queue.put(1)
    queue._reader.close()
    for _ in range(2):
        with pytest.raises(BrokenPipeError) as caught:
            queue.put(2)
        assert caught.value.errno == errno.EPIPE


@pytest.mark.parametrize("kind", KINDS)
def test_wait_for_several(kind: str) -> None:
    """`multiprocessing.connection.wait` takes a queue's reader; the reader and writer are connections."""
    one, other = make(kind), make(kind)
    assert connection.wait([one._reader, other._reader], 0) == []
    other.put([1])
    assert connection.wait([one._reader, other._reader], 10) == [other._reader]
    assert other._reader.poll()
    assert other._reader.recv() == [1]
    one._writer.send(torch.ones(3))
    assert one.get().sum() == 3


def test_count_after_a_writer_of_others() -> None:
    """What goes through `_writer` is counted, too."""
    queue = make("Queue")
    queue._writer.send(1)
    queue.put(2)
    assert queue.qsize() == 2
    assert [queue.get(), queue.get()] == [1, 2]


# Errors of pickling ---------------------------------------------------------------------------------------------------


class Unpicklable:
    """Says so."""

    def __reduce__(self) -> Any:
        raise AttributeError("not this one")


def test_what_cannot_be_pickled_is_told_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Stock's hook is called, which prints; the queue goes on."""
    queue = make("Queue", FORK, 1)
    queue.put(Unpicklable())
    assert "not this one" in capsys.readouterr().err
    queue.put(1)
    assert queue.get() == 1
    queue.put(torch.ones(2, requires_grad=True) * 2)
    assert "Cowardly refusing" in capsys.readouterr().err
    assert queue.empty()


def test_the_hook_can_be_overridden() -> None:
    """As `concurrent.futures` does it."""
    seen: list[Any] = []

    class Careful(queues.Queue):
        @staticmethod
        def _on_queue_feeder_error(error: Exception, obj: Any) -> None:
            seen.append((type(error), obj))

    queue = Careful(ctx=FORK)
    item = Unpicklable()
    queue.put(item)
    assert seen == [(AttributeError, item)]


def test_errors_of_a_simple_queue_are_raised() -> None:
    """There is no feeder to hide them; nor is there where others look in."""
    for send in (make("SimpleQueue").put, make("Queue")._writer.send):
        with pytest.raises(AttributeError, match="not this one"):
            send(Unpicklable())


def unpickle_badly() -> None:
    """Called while unpickling."""
    raise LookupError("cannot be unpickled")


class BadToUnpickle:
    """Pickles well."""

    def __reduce__(self) -> Any:
        return unpickle_badly, ()


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_unpickled(kind: str) -> None:
    """`get` raises, once, and closes the descriptors that came along (the leak check sees to it)."""
    queue = make(kind)
    queue.put((torch.ones(3), BadToUnpickle(), torch.ones(3)))
    queue.put(2)
    with pytest.raises(LookupError, match="cannot be unpickled"):
        queue.get()
    assert queue.get() == 2


def test_a_reduction_that_uses_queues() -> None:
    """Encoding and decoding may be in the middle of another."""
    queue, other = make("Queue"), make("Queue")
    queue.put(Putting(other))
    assert queue.get() == "outer"
    assert other.get() == "inner"


class Putting:
    """Puts something while it is pickled."""

    def __init__(self, queue: Any) -> None:
        self.queue = queue

    def __reduce__(self) -> Any:
        self.queue.put("inner")
        return str, ("outer",)


# Joining --------------------------------------------------------------------------------------------------------------


def test_join(context: Any) -> None:
    """`join` returns when every task is done, also those that waited in a backlog."""
    queue = make("JoinableQueue", context)
    process = context.Process(target=cases.work_off, args=(queue,))
    for index in range(cases.MANY):
        queue.put(index)
    process.start()
    queue.join()
    assert queue.qsize() == 0
    queue.put(None)
    queue.join()
    assert ended(process) == 0
    with pytest.raises(ValueError, match=r"task_done\(\) called too many times"):
        queue.task_done()
    queue.close()
    queue.join_thread()


def test_join_of_nothing() -> None:
    """It returns, and waits again when there is something."""
    queue = make("JoinableQueue", FORK, 1)
    queue.join()
    queue.put(1)
    with pytest.raises(stdlib_queue.Full):  # is not a task
        queue.put_nowait(2)
    joiner = threading.Thread(target=queue.join)
    joiner.start()
    queue.get()
    joiner.join(0.1)
    assert joiner.is_alive()
    queue.task_done()
    joiner.join(10)
    assert not joiner.is_alive()


# With other machinery -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_an_executor_over_our_context(method: str) -> None:
    """`concurrent.futures` takes its queues from the context, and looks into them."""
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=mp.get_context(method)) as executor:
        assert list(executor.map(cases.square, range(30), timeout=30)) == [number * number for number in range(30)]


@pytest.mark.parametrize("method", METHODS)
def test_stocks_pool_over_our_queues(method: str) -> None:
    """Stock's pool uses the locks, readers and writers of its simple queues."""
    with pool.Pool(2, context=mp.get_context(method)) as workers:
        assert workers.map(cases.square, range(50)) == [number * number for number in range(50)]
        workers.map_async(time.sleep, [5] * 50)  # in the middle of which it is terminated
    workers.join()


def test_a_subclass_with_state_of_its_own() -> None:
    """The usual way to give a queue a counter."""
    context = mp.get_context("spawn")
    queue = Counted(ctx=context)
    process = context.Process(target=cases.put_all, args=(queue, [1, 2, 3]))
    process.start()
    assert [queue.get() for _ in range(3)] == [1, 2, 3]
    assert ended(process) == 0
    assert queue.count.value == 3


class Counted(queues.Queue):
    """Counts what is put."""

    def __init__(self, *, ctx: Any) -> None:
        super().__init__(ctx=ctx)
        self.count = ctx.Value("i", 0)

    def __getstate__(self) -> Any:
        return super().__getstate__(), self.count

    def __setstate__(self, state: Any) -> None:
        inner, self.count = state
        super().__setstate__(inner)

    def put(self, *args: Any, **kwargs: Any) -> None:
        super().put(*args, **kwargs)
        with self.count.get_lock():
            self.count.value += 1


def test_raw_fork() -> None:
    """A child made by `os.fork` alone can use the queue."""
    queue = make("Queue")
    pid = os.fork()
    if pid == 0:
        try:
            queue.put(torch.ones(3))
        finally:
            os._exit(0)
    assert queue.get().sum() == 3
    os.waitpid(pid, 0)


def test_more_descriptors_than_there_are() -> None:
    """The soft limit is raised; past the hard one there is an error that says so, and the queue stays usable."""
    run_program(Path(__file__).parent / "programs" / "many_descriptors.py", timeout=40).check()
