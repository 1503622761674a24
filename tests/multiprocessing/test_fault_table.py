"""Every way to end x every moment to end in x every start method: the right error, and the others go on.

The leak check that runs with every test is part of each row: no child, descriptor, memory or semaphore stays.
"""

from __future__ import annotations

import contextlib
import multiprocessing.pool
from collections.abc import Iterator
from typing import Any

import pytest

import torchcrew.multiprocessing as mp
from tests.multiprocessing import fault_cases as cases
from tests.multiprocessing.fault_cases import ENDS, ProcessTrap, Trap
from torchcrew.errors import PeerDied
from torchcrew.testing.crash import CRASH_TEXT, EXIT_CODE

METHODS = ("fork", "spawn", "forkserver", "zygote")
#: Long beside anything that happens here, and shorter than the test's own deadline.
DEADLINE = 10
MESSAGES = list(range(20))

pytestmark = [
    pytest.mark.usefixtures("_no_stack_dumps"),
    # Spawn and forkserver are served by the zygote as well.
    pytest.mark.parametrize(
        "method", [pytest.param(m, marks=() if m in ("fork", "zygote") else pytest.mark.faults) for m in METHODS]
    ),
    # The thread that it finds is faulthandler's, which prints the stacks of a test that hangs.
    pytest.mark.filterwarnings("ignore:fork of a process with:RuntimeWarning"),
    # Said to who waits at a queue while one of its holders fails and others are left.
    pytest.mark.filterwarnings("ignore:.* is gone; this process goes on waiting:RuntimeWarning"),
]
every_end = pytest.mark.parametrize("how", ENDS)
every_queue = pytest.mark.parametrize("kind", ["Queue", "SimpleQueue"])


@pytest.fixture
def ctx(method: str) -> Any:
    return mp.get_context(method)


@contextlib.contextmanager
def started(ctx: Any, target: Any, *args: Any) -> Iterator[Any]:
    """A child that is gone afterwards, whatever happens."""
    child = ctx.Process(target=target, args=args)
    child.start()
    try:
        yield child
    finally:
        child.kill()
        child.join(DEADLINE)
        child.close()


@contextlib.contextmanager
def queues(ctx: Any, kind: str, count: int = 2) -> Iterator[list[Any]]:
    """Queues that are closed afterwards."""
    made = [getattr(ctx, kind)() for _ in range(count)]
    try:
        yield made
    finally:
        for queue in made:
            queue.close()
            if kind == "Queue":
                queue.join_thread()


def exitcode(child: Any) -> int | None:
    child.join(DEADLINE)
    code: int | None = child.exitcode
    return code


def check_exchange(inbox: Any, outbox: Any, sibling: Any) -> None:
    """Everything that is sent now comes back, once, from the sibling, which then ends by itself."""
    for message in MESSAGES:
        inbox.put(message)
    assert sorted(outbox.get() for _ in MESSAGES) == MESSAGES
    inbox.put(None)
    assert exitcode(sibling) == 0


def test_error_while_the_target_is_pickled(ctx: Any, method: str) -> None:
    """The error of the user's object, from start(); no child is left half started; fork pickles nothing."""
    child = ctx.Process(target=cases.nothing, args=(Trap("exception", "pickled"),))
    if method == "fork":
        child.start()
        assert exitcode(child) == 0
    else:
        with pytest.raises(RuntimeError, match=f"^{CRASH_TEXT}$"):
            child.start()
        assert mp.active_children() == []
    with started(ctx, cases.nothing) as another:
        assert exitcode(another) == 0


@every_end
def test_while_the_target_is_unpickled(ctx: Any, how: str) -> None:
    """The exit code tells; fork unpickles nothing."""
    with started(ctx, cases.nothing, ProcessTrap(how, "unpickled")) as child:
        expected = {0} if ctx.get_start_method() == "fork" else {ENDS[how]}
        if how == "exit" and ctx.get_start_method() == "forkserver":
            expected.add(1)  # stock's server makes every exit at this moment a 1
        assert exitcode(child) in expected


@every_end
def test_while_running(ctx: Any, how: str) -> None:
    """The exit code tells."""
    with started(ctx, cases.end, how) as child:
        assert exitcode(child) == ENDS[how]


@every_queue
@every_end
def test_in_put(ctx: Any, how: str, kind: str) -> None:
    """A process that ends while it pickles what it puts takes nothing with it but that."""
    with (
        queues(ctx, kind) as (inbox, outbox),
        started(ctx, cases.echo, inbox, outbox) as sibling,
        started(ctx, cases.end_in_put, how, inbox, outbox) as victim,
    ):
        code = exitcode(victim)
        if kind == "Queue" and how == "exception":
            # An object that cannot be pickled is reported and left out; the process goes on.
            assert code == 0
            assert outbox.get() == "after"
        elif kind == "Queue" and how == "exit":
            # Stock pickles in a thread, where SystemExit ends nothing but the thread.
            assert code in (0, EXIT_CODE)
            if code == 0 and not outbox.empty():
                assert outbox.get() == "after"
        else:
            assert code == ENDS[how]
        check_exchange(inbox, outbox, sibling)


@every_queue
@every_end
def test_in_get(ctx: Any, how: str, kind: str) -> None:
    """A process that ends while it unpickles what it got takes nothing with it but that."""
    with (
        queues(ctx, kind) as (inbox, outbox),
        started(ctx, cases.echo, inbox, outbox) as sibling,
        started(ctx, cases.end_in_get, how, inbox, outbox) as victim,
    ):
        inbox.put(Trap(how, "unpickled"))
        assert exitcode(victim) == ENDS[how]
        check_exchange(inbox, outbox, sibling)


@every_queue
@every_end
def test_while_idle_in_get(ctx: Any, how: str, kind: str) -> None:
    """A process that ends while it waits for a message leaves the messages to the others that wait."""
    with (
        queues(ctx, kind) as (inbox, outbox),
        started(ctx, cases.end_when_idle, how, inbox, outbox) as victim,
        started(ctx, cases.echo, inbox, outbox) as sibling,
    ):
        assert outbox.get() == "ready"  # it was there first: with a lock, it would hold it
        cases.tell(victim.pid)
        assert exitcode(victim) == ENDS[how]
        check_exchange(inbox, outbox, sibling)


@every_queue
@every_end
def test_the_last_other_holder_ends(ctx: Any, how: str, kind: str) -> None:
    """Who waits for it learns which process it was and how it ended, and can go on with the queue."""
    with queues(ctx, kind, 1) as (queue,), started(ctx, cases.end_soon, how, queue) as child:
        with pytest.raises(PeerDied) as caught:
            queue.get()
        assert str(child.pid) in str(caught.value)
        assert (how if how.startswith("SIG") else str(ENDS[how])) in str(caught.value)
        assert exitcode(child) == ENDS[how]
        queue.put("to myself")
        assert queue.get() == "to myself"


@contextlib.contextmanager
def pool_of_two(ctx: Any, **options: Any) -> Iterator[Any]:
    """A pool that must be able to work and to end in order after whatever happened to it."""
    pool = ctx.Pool(2, **options)
    try:
        yield pool
        assert pool.map_async(abs, [-number for number in MESSAGES]).get(DEADLINE) == MESSAGES
        pool.close()
        pool.join()
    finally:
        pool.terminate()
        pool.join()


@every_end
def test_pool_worker_unpickling_a_task(ctx: Any, how: str) -> None:
    """The task fails, with the error or with the worker's end; the pool goes on."""
    with pool_of_two(ctx) as pool:
        task = pool.apply_async(cases.identity, (ProcessTrap(how, "unpickled"),))
        with pytest.raises(RuntimeError):
            task.get(DEADLINE)


@every_end
def test_pool_worker_in_a_task(ctx: Any, how: str) -> None:
    """An exception is the task's; any other end is told, with the pid; the pool goes on."""
    with pool_of_two(ctx) as pool:
        task = pool.apply_async(cases.end, (how,))
        with pytest.raises(RuntimeError, match=CRASH_TEXT if how == "exception" else r"\d+"):
            task.get(DEADLINE)


@every_end
def test_pool_worker_pickling_a_result(ctx: Any, how: str) -> None:
    """What cannot be pickled is stock's error; any other end is told; the pool goes on."""
    with pool_of_two(ctx) as pool:
        task = pool.apply_async(cases.trap_as_result, (how,))
        expected = multiprocessing.pool.MaybeEncodingError if how == "exception" else RuntimeError
        with pytest.raises(expected):
            task.get(DEADLINE)


@every_end
def test_pool_worker_idle(ctx: Any, how: str) -> None:
    """A worker that ends between two tasks is replaced; no task is lost."""
    with pool_of_two(ctx, initializer=cases.end_on_signal, initargs=(how,)) as pool:
        assert pool.apply(abs, (-1,)) == 1
        cases.tell(mp.active_children()[0].pid)
        assert pool.map_async(abs, [-number for number in MESSAGES]).get(DEADLINE) == MESSAGES
