"""Start method "zygote": processes with spawn's semantics, forked in milliseconds from one that has imported torch.

    user's process                     zygote (exec'd once; own process group; one thread)      zygote_main.py
    ┌────────────────────┐  request    ┌───────────────────────────────┐ fork  ┌────────────┐
    │ ZygoteProcess      │ ──────────► │ torch and the preloads        │ ────► │ a child    │   zygote_child.py
    │   Popen            │ ◄────────── │                               │       └────────────┘
    │     sentinel=pidfd │  pid, pidfd └──────────────┬────────────────┘
    │     status pipe    │                            │ fork, import the script once, check that nothing was spoilt
    └──────┬─────────────┘  request    ┌──────────────▼────────────────┐ fork  ┌────────────┐
           │ guardian.watch(pid)  ───► │ main zygote: + ``__mp_main__``│ ────► │ a child    │
           ▼                           └───────────────────────────────┘       └────────────┘
        guardian

Owner      one zygote for each process that starts such processes, from its first start (or `warm`) to its end.
           A forked child has none until it starts a process itself.
Situation  every request carries the environment, directory, `sys.path`, arguments, limits ... of its moment. A child
           is forked from the main zygote only if the script was imported in that same situation; otherwise it is
           forked from the other one and imports the script itself, as a spawned process does.
Closing    `stop`, or the end of the user's process.
Death      user dies: the guardian kills zygotes and children; a child that was not yet guarded was not let go either.
           zygote dies: children run on, their exit code is unknown (255, as with forkserver); the next start makes
           another zygote.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import connection, popen_fork, process, reduction, spawn
from multiprocessing import context as _typed_context
from multiprocessing import util as _typed_util
from multiprocessing.context import BaseContext
from types import MappingProxyType
from typing import Any

from torchcrew.crew import guardian
from torchcrew.crew.functions import without_missing_script
from torchcrew.crew.situation import Situation
from torchcrew.crew.zygote_servers import COLD_TIMEOUT, Gone, Zygotes, script_of, to_memory, tracker_fd
from torchcrew.crew.zygote_wire import ENVIRON, EXIT_CODE, StartRequest, inherited_fds

__all__ = (
    "Popen",
    "ZygoteContext",
    "ZygoteProcess",
    "descriptors",
    "explain",
    "get_context",
    "pids",
    "preload",
    "register",
    "stop",
    "warm",
)

# Their type hints leave out, or narrow to stock's start methods, what start methods use of them.
util: Any = _typed_util
context: Any = _typed_context

#: How long the exit code of a dead child may take, in seconds: the zygote was stopped when it takes longer.
STATUS_TIMEOUT = 5.0
#: A larger payload goes through a pipe, which waits for its reader, so that it is in memory only once.
PAYLOAD_IN_MEMORY = 32 << 20
#: How often a start is tried anew when the zygote turns out to be gone.
TRIES = 4


def get_context() -> ZygoteContext:
    """Return the context of the start method "zygote", to be used like `multiprocessing.get_context("spawn")`."""
    return _context


def preload(*modules: str) -> None:
    """Have these modules imported by the zygote, once, instead of by every process started from it.

    A name that cannot be imported is passed over: the process that needs it says so itself. A zygote that runs already
    is replaced at the next start.
    """
    with _lock:
        _preloads.extend(name for name in modules if name not in _preloads)


def warm() -> None:
    """Start the zygote in the background, so that the first process need not wait for it; returns at once.

    Does nothing in a process that is just importing its script.
    """
    if getattr(process.current_process(), "_inheriting", False):
        return
    situation, preparation = Situation.capture(), without_missing_script(spawn.get_preparation_data(""))
    with _lock:
        zygotes = _own()
        base = zygotes.ensure_base(situation)
        script = script_of(preparation)
        if zygotes.main is None and script is not None and script not in zygotes.spoilt:
            with contextlib.suppress(Gone):
                zygotes.start_main(base, situation, preparation)


def stop(timeout: float = 5.0) -> None:
    """End this process's zygotes and wait for that; children that still run are left alone, without exit codes."""
    with _lock:
        zygotes = _own()
        if zygotes.main is not None and zygotes.main.reason is None:
            with contextlib.suppress(Gone):
                zygotes.main.settle(0.0)
        zygotes.drop_all()
        deadline = time.monotonic() + timeout
        for server in zygotes.retired:
            server.kill()
        while zygotes.retired and time.monotonic() < deadline:
            zygotes.reap()
            time.sleep(0.001)


def pids() -> tuple[int, ...]:
    """Pids of this process's zygotes that run now."""
    with _lock:
        zygotes = _own()
        zygotes.reap()
        return tuple(server.pid for server in zygotes.servers() if server.is_alive())


def descriptors() -> tuple[int, ...]:
    """The raw descriptors that this process keeps open for its zygotes: a control socket and a pidfd each."""
    with _lock:
        return tuple(fd for server in _own().servers() for fd in server.descriptors())


def explain() -> str:
    """Say in one sentence which way processes are started now and why; for `torchcrew doctor` and tests."""
    with _lock:
        zygotes = _own()
        if zygotes.base is None:
            return "no zygote is running"
        if zygotes.main is not None and zygotes.main.reason == "":
            return "processes are forked with the script imported"
        reasons = [f"; {script} is imported by every process: {why}" for script, why in zygotes.spoilt.items()]
        return "processes are forked with the preloads imported" + "".join(reasons)


class _DupFd:
    """A descriptor on its way to a child."""

    def __init__(self, index: int) -> None:
        self.index = index

    def detach(self) -> int:
        return inherited_fds[self.index]


class Popen(popen_fork.Popen):
    """One process started from the zygote, as `multiprocessing` handles it."""

    method = "zygote"
    DupFd = _DupFd
    returncode: int | None
    #: Whether the process gets a process group of its own. One in the user's gets the terminal's Ctrl-C, as a stock
    #: child does; what it starts itself is then not killed together with it.
    own_group = True
    #: Pickles the process object; `functions.dump` is another way.
    dump: Callable[..., None] = staticmethod(reduction.dump)

    def __init__(self, process_obj: process.BaseProcess) -> None:
        """Start a process that runs ``process_obj``."""
        self._fds: list[int] = []
        self._reading = threading.Lock()
        super().__init__(process_obj)

    def duplicate_for_child(self, fd: int) -> int:
        """Send a descriptor along; returns what `DupFd` takes."""
        self._fds.append(fd)
        return len(self._fds) - 1

    def _launch(self, process_obj: process.BaseProcess) -> None:
        preparation = without_missing_script(spawn.get_preparation_data(process_obj.name))
        preparation[ENVIRON] = dict(getattr(process_obj, "environ", ()))
        situation = Situation.capture()
        buffer = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump((situation, preparation), buffer)
            self.dump(process_obj, buffer)
        finally:
            context.set_spawning_popen(None)
        with _lock:
            for _ in range(TRIES):
                try:
                    self._start(_own(), situation, preparation, buffer)
                    return
                except Gone:
                    _own().drop_all()
        raise RuntimeError(
            f"the zygote could not be started: it died or gave no answer, {TRIES} times. "
            f"Does `{sys.executable} -c 'import torch'` work, and is there memory for one more process?"
        )

    def _start(self, zygotes: Zygotes, situation: Situation, preparation: dict[str, Any], buffer: io.BytesIO) -> None:
        """Have a zygote fork the child, guard it, and let it go."""
        server = zygotes.choose(situation, preparation)
        with contextlib.ExitStack() as passed, contextlib.ExitStack() as kept:
            go_r, go_w = _pipe(passed, kept)
            status_w, status_r = reversed(_pipe(kept, passed))
            payload, feed = _payload(buffer, passed, kept)
            group = 0 if self.own_group else os.getpgrp()
            request = StartRequest(payload, go_r, status_w, tracker_fd(), _standard_streams(), self._fds, group)
            number = server.request(b"S", *request.pack())
            kind, value, sentinel = server.reply(number, COLD_TIMEOUT)
            passed.close()
            if kind == b"E":
                raise OSError(value, os.strerror(value))
            if kind != b"S":
                raise Gone
            kept.callback(os.close, sentinel)
            guardian.watch(value, own_group=self.own_group)
            kept.pop_all()
        self.pid, self.sentinel, self._status = value, sentinel, status_r
        self.finalizer = util.Finalize(self, util.close_fds, (sentinel, status_r))
        # A child that died before it was let go, or had read all, says so by its exit code.
        with contextlib.suppress(BrokenPipeError), open(go_w, "wb", buffering=0) as go:
            go.write(b"G")
        if feed is not None:
            with contextlib.suppress(BrokenPipeError), open(feed, "wb") as pipe:
                pipe.write(buffer.getbuffer())

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code, None while the process runs; waits for its end unless ``flag`` is ``os.WNOHANG``."""
        if self.returncode is None:
            if not connection.wait([self.sentinel], 0 if flag == os.WNOHANG else None):
                return None
            with self._reading:
                if self.returncode is None:
                    code = _read_exit_code(self._status)
                    guardian.forget(self.pid)
                    self.returncode = code
        return self.returncode

    def _send_signal(self, sig: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.sentinel, sig)


class ZygoteProcess(process.BaseProcess):
    """A process started from the zygote; like a spawned one in everything but the time it takes."""

    _start_method = "zygote"
    #: Variables of the child's environment in addition to this process's; set before `start`.
    environ: Mapping[str, str] = MappingProxyType({})

    @staticmethod
    def _Popen(process_obj: process.BaseProcess) -> Popen:
        return Popen(process_obj)

    @staticmethod
    def _after_fork() -> None:
        """Nothing, as for a spawned process: what was made up to now is this process's own."""


class _Name(str):
    """The name of the start method, which stock's spawned children are not told: they know stock's methods only."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        # With every process its parent's default method is pickled.
        spawning = context.get_spawning_popen()
        return str, (str(self) if spawning is None or isinstance(spawning, Popen) else "spawn",)


class ZygoteContext(BaseContext):
    """The context of the start method "zygote"."""

    _name = _Name("zygote")
    Process = ZygoteProcess


def register(zygote_context: ZygoteContext) -> None:
    """Have `multiprocessing.get_context("zygote")` return this one."""
    context._concrete_contexts["zygote"] = zygote_context


_context = ZygoteContext()


def _pipe(reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    """Make a pipe whose ends are closed with these."""
    read, write = os.pipe()
    reader.callback(os.close, read)
    writer.callback(os.close, write)
    return read, write


def _payload(buffer: io.BytesIO, passed: contextlib.ExitStack, kept: contextlib.ExitStack) -> tuple[int, int | None]:
    """Return a descriptor the child reads the payload from, and the end to write it to when it is not yet in there."""
    if buffer.tell() <= PAYLOAD_IN_MEMORY:
        with contextlib.suppress(OSError):  # past `ulimit -f`
            memory = to_memory(buffer.getbuffer())
            passed.callback(os.close, memory)
            return memory, None
    return _pipe(passed, kept)


def _standard_streams() -> dict[int, int]:
    """Standard output and error, where they are open."""
    streams = {}
    for number in (1, 2):
        with contextlib.suppress(OSError):
            os.fstat(number)
            streams[number] = number
    return streams


def _read_exit_code(status: int) -> int:
    """Read a dead child's exit code; 255 when the zygote cannot tell it any more."""
    poller = select.poll()
    poller.register(status, select.POLLIN)
    data = os.read(status, EXIT_CODE.size) if poller.poll(STATUS_TIMEOUT * 1000) else b""
    return int(EXIT_CODE.unpack(data)[0]) if len(data) == EXIT_CODE.size else 255


_lock = threading.RLock()
_zygotes: Zygotes | None = None
_preloads: list[str] = ["torch"]
_hooks_registered = False


def _own() -> Zygotes:
    """Return this process's zygotes; what a fork inherited is given up."""
    global _zygotes, _hooks_registered
    if _zygotes is not None and _zygotes.owner != os.getpid():
        _after_fork_in_child()
    if _zygotes is None:
        if not _hooks_registered:
            _hooks_registered = True
            os.register_at_fork(after_in_child=_after_fork_in_child)
        _zygotes = Zygotes(_preloads)
    return _zygotes


def _after_fork_in_child() -> None:
    # The lock is not taken before a fork, which would have to wait for a start under way: whatever state that left,
    # its descriptors are all that is used of it here.
    global _lock, _zygotes
    _lock = threading.RLock()
    zygotes, _zygotes = _zygotes, None
    if zygotes is not None:
        zygotes.abandon()
