"""A recursive lock between processes that the kernel takes from a holder that dies.

    process A (holds it) ──┐                                        ┌── process B (waits, in steps of WAIT_STEP)
                           ▼                                        ▼
                 [ pthread mutex: robust, shared ]  in a block of the heap of `Value` and `Array`

Owner      the block belongs to who made the lock; everybody else has it mapped (by fork) or attached (spawn, zygote).
Death      of the holder, the process or only its thread, by whatever signal at whatever instruction: the kernel marks
           the mutex and wakes a waiter, who has it then. What the holder was writing stays half written.
           of a waiter, or of who made it: nobody notices.
Fork       a child does not hold what its parent holds.
Cost       half a microsecond to take and give back; stock's semaphore needs a tenth of that, and dies with its holder.

A mutex that is held is linked, by its address, into a list of its thread that the kernel reads at the thread's end:
its memory must not be unmapped or used for something else meanwhile. That is what `_held` is for.
"""

from __future__ import annotations

import ctypes
import errno
import os
from multiprocessing import synchronize
from multiprocessing.context import assert_spawning
from threading import get_native_id, local
from time import CLOCK_MONOTONIC, CLOCK_REALTIME, clock_gettime, monotonic
from typing import Any

from torchcrew.multiprocessing.heap import BufferWrapper

__all__ = ("RLock", "RobustMutex")

#: A wait in native code does not see Ctrl-C: it is interrupted as often as this to look, in seconds.
WAIT_STEP = 0.05
#: Bytes for a `pthread_mutex_t`: 40 on x86-64, 48 on aarch64.
MUTEX_BYTES = 64
#: The mutex's first word is known to the kernel: the thread that holds it, and two flags.
TID_MASK = 0x3FFFFFFF

_PROCESS_SHARED, _ROBUST, _ERROR_CHECK = 1, 1, 2

# What cannot block keeps the interpreter's lock, which is faster.
_quick = ctypes.PyDLL(None)
_slow = ctypes.CDLL(None)
_Address = ctypes.c_void_p
_prototype = ctypes.PYFUNCTYPE(ctypes.c_int, _Address)
_trylock = _prototype(("pthread_mutex_trylock", _quick))
_unlock = _prototype(("pthread_mutex_unlock", _quick))
_consistent = _prototype(("pthread_mutex_consistent", _quick))


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _lock_until(address: Any, seconds: float) -> int:
    """Wait at most so long for the mutex; returns the error code."""
    # glibc has had the one that steps of the clock do not disturb since 2.30.
    has_clocks = hasattr(_slow, "pthread_mutex_clocklock")
    clock = CLOCK_MONOTONIC if has_clocks else CLOCK_REALTIME
    whole, part = divmod(clock_gettime(clock) + seconds, 1.0)
    until = ctypes.byref(_Timespec(int(whole), int(part * 1e9)))
    if has_clocks:
        return int(_slow.pthread_mutex_clocklock(address, clock, until))
    return int(_slow.pthread_mutex_timedlock(address, until))


class _Thread(local):
    """What tells this thread from all others; their idents are used again at once."""

    def __init__(self) -> None:
        self.me = object()


_thread = _Thread()
# The mutexes that this process holds.
_held: set[RobustMutex] = set()


def _hold_nothing() -> None:
    for mutex in _held:
        mutex._owner, mutex._depth = None, 0
    _held.clear()


os.register_at_fork(after_in_child=_hold_nothing)


class RobustMutex:
    """The mutex in a block, with the interface of what is below a standard library's RLock.

    Args:
        wrapper: a zeroed block, or one that has such a mutex.
        new: make the mutex in it.
    """

    __slots__ = ("__weakref__", "_address", "_depth", "_owner", "_word", "wrapper")

    maxvalue = 1

    def __init__(self, wrapper: BufferWrapper, new: bool) -> None:
        self.wrapper = wrapper
        self._address = _Address(wrapper.address)
        self._word = ctypes.c_uint32.from_address(wrapper.address)
        # The thread of this process that has it, or had it when it ended.
        self._owner: object = None
        self._depth = 0
        if new:
            _make(self._address)

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Take the lock, once more if this thread has it.

        Returns:
            False if others had it until ``timeout`` seconds were over, or without ``block`` now.
        """
        if self._owner is _thread.me:
            self._depth += 1
            return True
        try:
            code = _trylock(self._address)
            depth = 1 if code == 0 else self._wait(code, block, timeout)
            if depth == 0:
                return False
            _held.add(self)
            self._depth = depth
            self._owner = _thread.me
            return True
        except BaseException:  # a signal's handler raised, when the lock was taken already or before
            self._let_go()
            raise

    def _wait(self, code: int, block: bool, timeout: float | None) -> int:
        """Wait after ``code``; returns how often this thread has the lock then."""
        until = None if timeout is None else monotonic() + timeout
        while code in (errno.EBUSY, errno.ETIMEDOUT):
            left = WAIT_STEP if until is None else min(WAIT_STEP, until - monotonic())
            if not block or left <= 0:
                return 0
            code = _lock_until(self._address, left)
        if code == errno.EDEADLK:
            # This is a signal's handler; what it interrupted has just taken the lock and did not yet count it.
            return 2
        if code == errno.EOWNERDEAD:
            code = _consistent(self._address)
        if code != 0:
            raise OSError(code, f"taking a lock: {os.strerror(code)}")
        return 1

    def _let_go(self) -> None:
        """Be without the lock, whether this thread has it or not."""
        if self._is_this_thread():
            self._owner, self._depth = None, 0
            _held.discard(self)
            _consistent(self._address)
            _unlock(self._address)

    def release(self) -> None:
        """Give back one `acquire`.

        Raises:
            AssertionError: this thread does not have the lock.
        """
        if self._owner is not _thread.me:
            raise AssertionError("attempt to release recursive lock not owned by thread")
        if self._depth > 1:
            self._depth -= 1
            return
        try:
            _held.discard(self)
        finally:  # a signal's handler may run, and raise, after any call, but not between these two
            self._owner = None
            _unlock(self._address)

    __enter__ = acquire

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def _is_this_thread(self) -> bool:
        return bool((self._word.value & TID_MASK) == get_native_id())

    def _is_mine(self) -> bool:
        return self._owner is _thread.me

    def _count(self) -> int:
        return 0 if self._owner is None else self._depth

    def _get_value(self) -> int:
        return int(not self._word.value & TID_MASK)

    def _is_zero(self) -> bool:
        return not self._get_value()


def _make(address: Any) -> None:
    """Make a mutex of zeroed memory."""
    attributes = ctypes.create_string_buffer(MUTEX_BYTES)
    code = _quick.pthread_mutexattr_init(attributes)
    code = code or _quick.pthread_mutexattr_settype(attributes, _ERROR_CHECK)
    code = code or _quick.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED)
    code = code or _quick.pthread_mutexattr_setrobust(attributes, _ROBUST)
    code = code or _quick.pthread_mutex_init(address, attributes)
    if code:
        raise OSError(code, f"making a lock: {os.strerror(code)}")


class RLock(synchronize.RLock):
    """A recursive lock between processes that no death can leave taken; otherwise as `multiprocessing.RLock`.

    It can go to children of every start method, whatever context it was made in.
    """

    _semlock: Any
    _make_methods: Any
    acquire: Any
    release: Any

    def __init__(self, *, ctx: Any = None) -> None:
        self._attach(BufferWrapper(MUTEX_BYTES), new=True)

    def __enter__(self) -> Any:
        return self._semlock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self._semlock.release()

    def _attach(self, wrapper: BufferWrapper, new: bool) -> None:
        self._semlock = RobustMutex(wrapper, new)
        self._is_fork_ctx = False
        self._make_methods()

    def __getstate__(self) -> BufferWrapper:
        assert_spawning(self)
        wrapper: BufferWrapper = self._semlock.wrapper
        return wrapper

    def __setstate__(self, state: BufferWrapper) -> None:
        self._attach(state, new=False)
