"""Every name of `torch.multiprocessing`, with its semantics: ``import torchcrew.multiprocessing as mp``.

Processes
  start methods   stock's three, and "zygote": spawn's semantics in milliseconds. "spawn" and "forkserver" are served
                  by the zygote, too; `set_start("exec")` or ``TORCHCREW_START=exec`` gives the real exec back.
                  The start method that is set is one for this module and for the standard library's.
  death           children die with this process, by whatever signal it ends. A child that failed and whose exit code
                  nobody has read is named, in one line, when this process exits.
  fork            warns where threads or CUDA make it unsafe.

context.py, popen.py, forking.py, children.py   processes
queues.py, connection.py, pool.py               what travels between them
heap.py, sharedctypes.py                        shared numbers
spawn.py                                        many processes that run one function
install.py                                      all this under `torch.multiprocessing`'s own name
aliases.py                                      submodules that are stock's
"""

from importlib import import_module
from typing import Any

import torch.multiprocessing as _torch
from torch.multiprocessing import get_all_sharing_strategies, get_sharing_strategy, set_sharing_strategy

from torchcrew.crew import zygote as _zygote
from torchcrew.multiprocessing import aliases
from torchcrew.multiprocessing.context import default_context as _context
from torchcrew.multiprocessing.popen import get_start, set_start

__all__ = (
    "ENV_VAR_PARALLEL_START",
    "SUBDEBUG",
    "SUBWARNING",
    "Array",
    "AuthenticationError",
    "Barrier",
    "BoundedSemaphore",
    "BufferTooShort",
    "Condition",
    "Event",
    "JoinableQueue",
    "Lock",
    "Manager",
    "Pipe",
    "Pool",
    "Process",
    "ProcessContext",
    "ProcessError",
    "ProcessExitedException",
    "ProcessRaisedException",
    "Queue",
    "RLock",
    "RawArray",
    "RawValue",
    "Semaphore",
    "SimpleQueue",
    "SpawnContext",
    "TimeoutError",
    "Value",
    "active_children",
    "allow_connection_pickling",
    "cpu_count",
    "current_process",
    "freeze_support",
    "get_all_sharing_strategies",
    "get_all_start_methods",
    "get_context",
    "get_logger",
    "get_sharing_strategy",
    "get_start",
    "get_start_method",
    "log_to_stderr",
    "parent_process",
    "reducer",
    "set_executable",
    "set_forkserver_preload",
    "set_sharing_strategy",
    "set_start",
    "set_start_method",
    "spawn",
    "start_processes",
)

SUBDEBUG = 5
SUBWARNING = 25

Array = _context.Array
AuthenticationError = _context.AuthenticationError
Barrier = _context.Barrier
BoundedSemaphore = _context.BoundedSemaphore
BufferTooShort = _context.BufferTooShort
Condition = _context.Condition
Event = _context.Event
JoinableQueue = _context.JoinableQueue
Lock = _context.Lock
Manager = _context.Manager
Pipe = _context.Pipe
Pool = _context.Pool
Process = _context.Process
ProcessError = _context.ProcessError
Queue = _context.Queue
RLock = _context.RLock
RawArray = _context.RawArray
RawValue = _context.RawValue
Semaphore = _context.Semaphore
SimpleQueue = _context.SimpleQueue
TimeoutError = _context.TimeoutError
Value = _context.Value
active_children = _context.active_children
allow_connection_pickling = _context.allow_connection_pickling
cpu_count = _context.cpu_count
current_process = _context.current_process
freeze_support = _context.freeze_support
get_all_start_methods = _context.get_all_start_methods
get_context = _context.get_context
get_logger = _context.get_logger
get_start_method = _context.get_start_method
log_to_stderr = _context.log_to_stderr
parent_process = _context.parent_process
reducer = _context.reducer
set_executable = _context.set_executable
set_forkserver_preload = _context.set_forkserver_preload
set_start_method = _context.set_start_method

aliases.add()
_zygote.preload(__name__)  # the processes that it starts find this module imported

# Last, because it needs what is above, and at once: its import binds the submodule to a name that is the function's.
from torchcrew.multiprocessing.spawn import (  # noqa: E402
    ENV_VAR_PARALLEL_START,
    ProcessContext,
    ProcessExitedException,
    ProcessRaisedException,
    SpawnContext,
    spawn,
    start_processes,
)


def __getattr__(name: str) -> Any:
    """A submodule, or a name of torch's module that it does not promise to anybody."""
    if aliases.is_submodule(name):
        return import_module(f"{__name__}.{name}")
    try:
        return getattr(_torch, name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_torch)})
