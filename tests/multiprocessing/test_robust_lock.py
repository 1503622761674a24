"""The lock of `Value` and `Array`: as stock's to those who use it, and nobody's death keeps it."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.multiprocessing.sharedctypes_cases import (
    PATIENCE,
    add_one,
    finish,
    hold_for_ever,
    in_thread,
    kill_me,
    outcome,
    run,
)
from torchcrew.multiprocessing import robust_lock
from torchcrew.multiprocessing.robust_lock import RLock
from torchcrew.multiprocessing.sharedctypes import RawValue, Value


@pytest.fixture
def _nothing_held() -> Iterator[None]:
    """Gives back what a test leaves taken: such a lock keeps its memory."""
    yield
    for mutex in list(robust_lock._held):
        mutex._let_go()
        robust_lock._held.discard(mutex)  # its thread has ended


LOCK_CALLS: list[Callable[[Any], Any]] = [
    lambda lock: lock.acquire(),
    lambda lock: (lock.acquire(), lock.acquire(), lock.release(), repr(lock)),
    lambda lock: lock.acquire(False),
    lambda lock: lock.acquire(block=False, timeout=5),
    lambda lock: lock.acquire(True, 0.01),
    lambda lock: lock.acquire(timeout=-3),
    lambda lock: lock.release(),
    lambda lock: repr(lock),
    lambda lock: (lock.acquire(), in_thread(lambda: lock.acquire(False)), in_thread(lambda: lock.acquire(True, 0.01))),
    lambda lock: (lock.acquire(), in_thread(lambda: lock.acquire(timeout=-1))),
    lambda lock: (lock.acquire(), in_thread(lock.release)),
    lambda lock: (lock.acquire(), in_thread(lambda: repr(lock))),
    lambda lock: (lock.acquire(), lock.release(), in_thread(lambda: (lock.acquire(), repr(lock), lock.release()))[0]),
    lambda lock: (lock.__enter__(), lock.__exit__(None, None, None), lock.release()),
    lambda lock: in_thread(lambda: (lock.__enter__(), repr(lock).count("Thread"), lock.release())),
    lambda lock: (lock.acquire(), in_thread(lambda: lock.acquire(True, "soon"))),
    lambda lock: (lock.acquire(), lock._semlock._count(), lock._semlock._get_value(), lock._semlock._is_mine()),
]


@pytest.mark.parametrize("number", range(len(LOCK_CALLS)))
@pytest.mark.usefixtures("_nothing_held")
def test_the_lock_is_stocks(number):
    """What RLock returns, raises and says of itself."""
    call = LOCK_CALLS[number]
    ours, theirs = outcome(lambda: call(RLock())), outcome(lambda: call(multiprocessing.RLock()))
    if number == 15:  # the text differs
        ours, theirs = ours[1][0], theirs[1][0]
    assert ours == theirs


def test_the_lock_is_not_the_childs(ctx):
    """A child started while it is held waits for it, and cannot release it."""
    value, lock = Value("i"), RLock()
    with lock:
        run(ctx, find_it_taken, value, lock)
    run(ctx, find_it_free, lock)
    assert value.value == 1


def find_it_taken(value: Any, lock: Any) -> None:
    """By another process."""
    assert lock.acquire(False) is False
    assert lock.acquire(timeout=0.01) is False
    assert repr(lock) == "<RLock(SomeOtherProcess, nonzero)>"
    with pytest.raises(AssertionError):
        lock.release()
    value.update(lambda old: old + 1)  # another lock works meanwhile


def find_it_free(lock: Any) -> None:
    """Twice."""
    with lock, lock:
        assert lock.acquire(False)
        lock.release()


def test_a_bare_fork_while_the_lock_is_held():
    """`os.fork` without multiprocessing: the child holds nothing, its death takes nothing away."""
    lock, other = RLock(), RLock()
    with lock, lock:
        pid = os.fork()
        if pid == 0:
            taken = not lock.acquire(False) and other.acquire(timeout=1)
            os._exit(0 if taken else 1)  # holding `other`
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert lock._semlock._count() == 2
        assert in_thread(lambda: lock.acquire(False)) is False
    assert other.acquire(timeout=PATIENCE)
    other.release()
    assert in_thread(lambda: (lock.acquire(False), lock.release())) == (True, None)


def test_a_thread_that_ends_holding_it():
    """The next one has it; a new thread, which may have the old one's ident, does not by that alone."""
    lock = RLock()
    assert in_thread(lambda: (lock.acquire(), lock.acquire())) == (True, True)
    assert in_thread(lock.release)[0] is AssertionError
    assert in_thread(lambda: (lock.acquire(timeout=1), lock._semlock._count(), lock.release())) == (True, 1, None)
    with lock:
        assert in_thread(lambda: lock.acquire(False)) is False


def test_conditions_work_with_it(fork):
    """multiprocessing.Condition asks the lock for more than threading's."""
    lock, ready = RLock(), RawValue("i")
    condition = fork.Condition(lock)
    process = fork.Process(target=notify, args=(condition, ready))
    with condition, condition:
        process.start()
        assert condition.wait_for(lambda: ready.value, PATIENCE)
        assert lock._semlock._count() == 2
    finish(process)


def notify(condition: Any, ready: Any) -> None:
    """Say it."""
    with condition:
        ready.value = 1
        condition.notify()


def test_ctrl_c_ends_a_wait():
    """KeyboardInterrupt arrives although the wait is in native code; the lock is as it was."""
    lock = RLock()
    release, held = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            release.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(PATIENCE)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        lock.acquire()
    release.set()
    thread.join(PATIENCE)
    timer.join(PATIENCE)
    assert lock.acquire(timeout=PATIENCE)
    lock.release()


def test_signals_that_raise_anywhere_leave_no_lock_taken():
    """An exception between taking the lock and knowing it: it is let go."""
    lock = RLock()

    class Alarm(Exception):
        pass

    def ring(*_: Any) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        for number in range(300):
            with contextlib.suppress(Alarm):
                signal.setitimer(signal.ITIMER_REAL, 0.0002 + number * 1e-7)
                while True:
                    lock._semlock.acquire()
                    if lock._semlock._depth > 1:  # the alarm came before the release below
                        break
                    lock._semlock.release()
            signal.setitimer(signal.ITIMER_REAL, 0)
            while lock._semlock._is_mine():
                lock.release()
            assert in_thread(lambda: (lock.acquire(timeout=1), lock.release())[0]) is True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_signal_handlers_that_use_the_lock():
    """Wherever they interrupt who takes and gives it back, it is taken when it should be and free afterwards."""
    lock, value = RLock(), Value("q")
    mutex = lock._semlock
    rings = 0

    def ring(*_: Any) -> None:
        nonlocal rings
        rings += 1
        with lock, lock:
            value.update(lambda old: old + 1)

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.00017)
        for _ in range(20_000):
            lock.acquire()
            taken = mutex._is_this_thread() and mutex._depth == 1
            lock.release()
            assert taken
            assert not mutex._is_this_thread()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert in_thread(lambda: (lock.acquire(False), lock.release())) == (True, None)
    assert value.value == rings > 0
    assert not robust_lock._held


def test_a_process_that_dies_holding_many(ctx):
    """All of them are given back, however they were taken."""
    locks = [RLock() for _ in range(300)]
    run(ctx, die_holding_all, locks, exitcode=-signal.SIGKILL)
    for lock in locks:
        assert lock.acquire(timeout=PATIENCE)
    for lock in reversed(locks):
        lock.release()


def die_holding_all(locks: list[Any]) -> None:
    """In another order than they lie in memory, one twice."""
    for lock in [*locks[::2], *reversed(locks[1::2]), locks[7]]:
        lock.acquire()
    locks[10].release()
    locks[10].acquire()
    kill_me()


def test_what_is_dropped_while_held_keeps_its_memory():
    """The kernel reads the mutexes a thread holds: their memory is not given out again, and other locks work on."""
    lock = RLock()
    address = lock._semlock.wrapper.address
    cycle = [lock]
    cycle.append(cycle)
    lock.acquire()
    del lock, cycle
    gc.collect()
    others = [RLock() for _ in range(100)]
    assert address not in [other._semlock.wrapper.address for other in others]
    for other in others:
        with other:
            pass
    (mutex,) = robust_lock._held
    mutex.release()


def test_a_process_that_becomes_another_program_gives_it_back(fork):
    """exec ends everything the process was."""
    lock = RLock()
    run(fork, exec_holding, lock)
    assert lock.acquire(timeout=PATIENCE)
    lock.release()


def exec_holding(lock: Any) -> None:
    """Hold and exec."""
    lock.acquire()
    os.execv("/bin/true", ["true"])


def test_waiters_are_woken_by_the_death(fork):
    """Several wait while the holder is killed: all get it."""
    value, held = Value("i"), fork.Event()
    holder = fork.Process(target=hold_for_ever, args=(value, held))
    holder.start()
    assert held.wait(PATIENCE)
    waiters = [fork.Process(target=add_one, args=(value,)) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    assert value.acquire(timeout=0.05) is False
    holder.kill()
    finish(holder, exitcode=-signal.SIGKILL)
    finish(*waiters)
    assert value.value == 3
