"""The results that users wait for: how a pool's task ends in them, well or not."""

from __future__ import annotations

import signal
import sys
import threading
from multiprocessing import pool as _typed
from typing import Any

from torchcrew.channel.peers import signal_name
from torchcrew.errors import PoolBroken, WorkerDied

__all__ = ("abandon", "deliver", "describe_exit", "reraise", "users_function", "worker_died")

_stock: Any = _typed


def reraise(error: BaseException) -> None:
    """A task that fails with ``error``, which is not sent to a worker for it."""
    raise error


def deliver(cache: dict[int, Any], job: int, index: int, obj: tuple[bool, Any]) -> None:
    """Give a result to who waits for it. An error in the user's callback is shown, and nobody waits for ever."""
    result = cache.get(job)
    if result is None:
        return
    try:
        result._set(index, obj)
    except KeyError:
        if job in cache:
            _callback_failed(cache, job, result)
    except BaseException:
        _callback_failed(cache, job, result)


def _callback_failed(cache: dict[int, Any], job: int, result: Any) -> None:
    threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
    event = getattr(result, "_event", None)
    if event is not None and not event.is_set() and not getattr(result, "_number_left", 0):
        event.set()
        cache.pop(job, None)
        result._pool = None


def users_function(func: Any, args: Any) -> Any:
    """The function that a task is about, which the library may have wrapped for a chunk."""
    return args[0][0] if func in (_stock.mapstar, _stock.starmapstar) else func


def worker_died(process: Any, func: Any, index: int) -> WorkerDied:
    """The error of a task whose worker died in it."""
    pid, code = process.pid, process.exitcode
    name = getattr(func, "__qualname__", None) or repr(func)
    text = f"a pool's worker ({process.name}, pid {pid}) {describe_exit(code)} while it ran {name}, task {index}"
    if code == -signal.SIGKILL:
        text += "; if nobody sent it, the kernel did, for want of memory"
    error = WorkerDied(text + ". This task is lost, the others are not.")
    error.pid, error.exitcode = pid, code
    return error


def describe_exit(code: int | None) -> str:
    """How a process ended, as a phrase; ``code`` is its exit code."""
    if code is None:
        return "ended, nobody knows how,"
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal_name(-code)}"


def abandon(result: Any) -> None:
    """Wake who waits for a result that will not come; callbacks are not called, as with the standard library."""
    error = (False, PoolBroken("the pool was terminated before this result was there"))
    if isinstance(result, _stock.IMapIterator):
        with result._cond:
            result._items.append(error)
            result._length = result._index
            result._cond.notify_all()
    else:
        result._success, result._value = error
        result._event.set()
    result._pool = None
