"""Contexts and process classes: the standard library's, with our queues, pools and ways to start.

    torchcrew.multiprocessing              multiprocessing (the standard library)
      DefaultContext ───── reads and sets ────► the start method: one state for both
        │ get_context()
        ▼
      fork   spawn   forkserver   zygote     each a subclass of the library's class of that name
        └────────┴────────┴──────────┴─────► Process ─► popen.py

"spawn" and "forkserver" are served by the zygote: what a process sees is what spawn shows it (fresh globals, this
process's environment and directory of this moment, the name of the start method), only sooner. `set_start("exec")`, or
the variable ``TORCHCREW_START=exec``, gives the library's own ways back.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from multiprocessing import context as _typed
from multiprocessing import process
from typing import Any, ClassVar

from torchcrew.crew import stacks, zygote
from torchcrew.multiprocessing import children, popen

__all__ = (
    "DefaultContext",
    "ForkContext",
    "ForkProcess",
    "ForkServerContext",
    "ForkServerProcess",
    "Process",
    "SpawnContext",
    "SpawnProcess",
    "ZygoteContext",
    "ZygoteProcess",
    "default_context",
)

_stock: Any = _typed  # its type hints leave out the state that is shared with it


def __getattr__(name: str) -> Any:
    """What the standard library's module has and this one has not."""
    return getattr(_stock, name)


def _ours(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"torchcrew.multiprocessing.{module}"), name)


class _Watched(process.BaseProcess):
    """Reading the exit code is noticed: a child that failed was looked at then. The process offers its stacks."""

    _exit_code_is_watched: ClassVar = True

    @property
    def exitcode(self) -> int | None:
        """Exit code of the process, or None while it runs or before it started."""
        code = super().exitcode
        if code is not None:
            children.seen(self)
        return code

    def _bootstrap(self, parent_sentinel: Any = None) -> Any:
        stacks.offer(self.name, self._parent_pid)  # type: ignore[attr-defined]
        return super()._bootstrap(parent_sentinel)  # type: ignore[misc]


class Process(_Watched, _typed.Process):
    """A process of the default start method."""

    @staticmethod
    def _Popen(process_obj: process.BaseProcess) -> Any:
        return default_context.get_context().Process._Popen(process_obj)

    @staticmethod
    def _after_fork() -> None:
        default_context.get_context().Process._after_fork()


class ForkProcess(_Watched, _typed.ForkProcess):
    """A process started by fork."""

    @staticmethod
    def _Popen(process_obj: process.BaseProcess) -> Any:
        return popen.ForkPopen(process_obj)


class SpawnProcess(_Watched, _typed.SpawnProcess):
    """A process with spawn's semantics."""

    @staticmethod
    def _Popen(process_obj: process.BaseProcess) -> Any:
        return (popen.SpawnPopen if popen.get_start() == "exec" else popen.ServedSpawn)(process_obj)

    @staticmethod
    def _after_fork() -> None:
        """Nothing: what was made up to now is this process's own."""


class ForkServerProcess(_Watched, _typed.ForkServerProcess):
    """A process with the fork server's semantics, but for the environment, which is its parent's of the moment."""

    @staticmethod
    def _Popen(process_obj: process.BaseProcess) -> Any:
        return (popen.ForkServerPopen if popen.get_start() == "exec" else popen.ServedForkServer)(process_obj)


class ZygoteProcess(_Watched, zygote.ZygoteProcess):
    """A process of the start method "zygote"."""

    @staticmethod
    def _Popen(process_obj: process.BaseProcess) -> Any:
        return popen.Served(process_obj)


class _Crew(_typed.BaseContext):
    """What is ours in every context."""

    def get_context(self, method: Any = None) -> Any:
        """Return the context of a start method, or this one."""
        if method is None:
            return self
        try:
            context = _contexts[method]
        except (KeyError, TypeError):
            return _typed.BaseContext.get_context(self, method)
        context._check_available()
        return context

    def Pipe(self, duplex: bool = True) -> Any:
        """Return two connections."""
        return _ours("connection", "Pipe")(duplex)

    def Queue(self, maxsize: int = 0) -> Any:
        """Return a queue."""
        return _ours("queues", "Queue")(maxsize, ctx=self.get_context())

    def JoinableQueue(self, maxsize: int = 0) -> Any:
        """Return a queue whose items are accounted for."""
        return _ours("queues", "JoinableQueue")(maxsize, ctx=self.get_context())

    def SimpleQueue(self) -> Any:
        """Return a queue without a feeder."""
        return _ours("queues", "SimpleQueue")(ctx=self.get_context())

    def Pool(
        self,
        processes: int | None = None,
        initializer: Any = None,
        initargs: Iterable[Any] = (),
        maxtasksperchild: int | None = None,
    ) -> Any:
        """Return a pool of processes."""
        pool = _ours("pool", "Pool")
        return pool(processes, initializer, initargs, maxtasksperchild, context=self.get_context())

    def Value(self, typecode_or_type: Any, *args: Any, lock: Any = True) -> Any:
        """Return a shared number."""
        return _ours("sharedctypes", "Value")(typecode_or_type, *args, lock=lock, ctx=self.get_context())

    def Array(self, typecode_or_type: Any, size_or_initializer: Any, *, lock: Any = True) -> Any:
        """Return a shared array."""
        return _ours("sharedctypes", "Array")(typecode_or_type, size_or_initializer, lock=lock, ctx=self.get_context())

    def set_forkserver_preload(self, module_names: list[str]) -> None:
        """Have these modules imported once, by the zygote, for the processes of spawn and forkserver."""
        super().set_forkserver_preload(module_names)
        zygote.preload(*(name for name in module_names if name != "__main__"))  # the script is imported anyway


class ForkContext(_Crew, _typed.ForkContext):
    """The start method "fork"; a process with threads or CUDA is warned."""

    Process = ForkProcess


class SpawnContext(_Crew, _typed.SpawnContext):
    """The start method "spawn"."""

    Process = SpawnProcess


class ForkServerContext(_Crew, _typed.ForkServerContext):
    """The start method "forkserver"."""

    Process = ForkServerProcess


class ZygoteContext(_Crew, zygote.ZygoteContext):
    """The start method "zygote": spawn's semantics in milliseconds, under a name of its own."""

    Process = ZygoteProcess


class DefaultContext(_Crew, _typed.DefaultContext):
    """The context of the start method that was set, here or in `multiprocessing`, or of the default one."""

    Process = Process

    def __init__(self) -> None:
        """Its state is the one of the standard library's default context."""

    @property
    def _default_context(self) -> Any:
        return _as_ours(_stock._default_context._default_context)

    @property
    def _actual_context(self) -> Any:
        return _as_ours(_stock._default_context._actual_context)

    @_actual_context.setter
    def _actual_context(self, context: Any) -> None:
        _stock._default_context._actual_context = _as_stocks(context)

    def get_context(self, method: Any = None) -> Any:
        """Return the context of a start method; of the present one for None."""
        if method is None:
            return _as_ours(_stock._default_context.get_context())
        return super().get_context(method)

    def get_all_start_methods(self) -> list[str]:
        """Return the names of the start methods: the library's, then "zygote"."""
        return [*super().get_all_start_methods(), "zygote"]


_contexts: dict[Any, Any] = {
    "fork": ForkContext(),
    "spawn": SpawnContext(),
    "forkserver": ForkServerContext(),
    "zygote": ZygoteContext(),
}
default_context = DefaultContext()
zygote.register(_contexts["zygote"])


def _as_ours(context: Any) -> Any:
    """Our context of the same method; one of a third party stays as it is."""
    if type(context).__module__ in (_stock.__name__, zygote.__name__):
        return _contexts.get(context._name, context)
    return context


def _as_stocks(context: Any) -> Any:
    """The standard library's context of the same method."""
    return _stock._concrete_contexts[context._name] if context in _contexts.values() else context
