"""Start method "zygote": processes with spawn's semantics, forked in milliseconds from one that has imported torch.

    user's process                     zygote (exec'd once; own process group; one thread)      zygote_main.py
    ┌────────────────────┐  request    ┌───────────────────────────────┐ fork  ┌────────────┐
    │ ZygoteProcess      │ ──────────► │ torch and the preloads        │ ────► │ a child    │
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
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing import connection, popen_fork, process, reduction, resource_tracker, spawn
from multiprocessing import context as _typed_context
from multiprocessing import util as _typed_util
from multiprocessing.context import BaseContext
from typing import Any

from torchcrew.crew import guardian
from torchcrew.crew.guardian_main import IGNORED, is_dead
from torchcrew.crew.situation import Situation
from torchcrew.crew.zygote_main import EXIT_CODE, HEADER, inherited_fds, receive, send

__all__ = ("ZygoteContext", "ZygoteProcess", "explain", "get_context", "pids", "preload", "stop", "warm")

# Their type hints leave out, or narrow to stock's start methods, what start methods use of them.
util: Any = _typed_util
context: Any = _typed_context

#: How long the first start waits for the zygote, in seconds: importing torch from a cold network disk takes a minute.
COLD_TIMEOUT = 180.0
#: How long a script may take to be imported beforehand, in seconds. One without a main guard may run for hours; after
#: this its children import it themselves, and meet stock's message there.
MAIN_TIMEOUT = 30.0
#: How long the exit code of a dead child may take, in seconds: the zygote was stopped when it takes longer.
STATUS_TIMEOUT = 5.0
#: A larger payload goes through a pipe, which waits for its reader, so that it is in memory only once.
PAYLOAD_IN_MEMORY = 32 << 20
#: Libraries read these when they are loaded, so a change of one needs another zygote.
_READ_AT_LOAD = ("TORCH_", "PYTORCH_", "ATEN_", "KMP_", "GOMP_", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_")
_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

_PROGRAM = (
    "import pickle, socket, sys; control = socket.socket(fileno=int(sys.argv[1])); "
    "path, preload = pickle.loads(control.recv(1 << 20)); sys.path[:] = path; "
    "from torchcrew.crew.zygote_main import main; main(control, int(sys.argv[2]), preload)"
)


class _GoneError(Exception):
    """The zygote is dead, or must be replaced because a file it has loaded has changed."""


class _Server:
    """A running zygote as its user sees it."""

    def __init__(self, control: socket.socket, pid: int, pidfd: int) -> None:
        self.control = control.detach()  # raw: says nothing at interpreter exit
        self.pid = pid
        self.pidfd = pidfd
        self.number = 0

    def request(self, kind: bytes, value: int, fds: tuple[int, ...]) -> int:
        """Send a message and return its number.

        Raises:
            _GoneError: nobody reads it.
        """
        self.number += 1
        with self._socket() as control:
            try:
                send(control, kind, self.number, value, fds)
            except (ConnectionError, TimeoutError) as error:
                raise _GoneError from error
        return self.number

    def reply(self, number: int, timeout: float) -> tuple[bytes, int, int]:
        """Wait for the answer to a message: kind, value, and a descriptor or -1.

        Raises:
            _GoneError: the zygote died, or gave no answer in time.
        """
        deadline = time.monotonic() + timeout
        while True:
            poller = select.poll()
            poller.register(self.control, select.POLLIN)
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise _GoneError
            with self._socket() as control:
                try:
                    message = receive(control)
                except OSError:
                    message = None
            if message is None:
                raise _GoneError
            kind, answered, value, fds = message
            if answered == number:
                return kind, value, fds[0] if fds else -1
            for fd in fds:  # of a start that was interrupted: its child sees that it may not go
                os.close(fd)

    @contextlib.contextmanager
    def _socket(self) -> Any:
        control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=self.control)
        try:
            yield control
        finally:
            control.detach()

    def retire(self) -> None:
        """Have it end when its last child has; it takes no more requests."""
        if self.control >= 0:
            with contextlib.suppress(OSError), self._socket() as control:
                control.setblocking(False)
                send(control, b"Q", 0)
            os.close(self.control)
            self.control = -1

    def kill(self) -> None:
        if self.pidfd >= 0:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def bury(self) -> None:
        """Forget a dead one."""
        self.retire()
        if self.pidfd >= 0:
            with contextlib.suppress(ChildProcessError):  # not our child but the zygote's, or reaped by somebody
                os.waitpid(self.pid, 0)
            guardian.forget(self.pid)
            os.close(self.pidfd)
            self.pidfd = -1

    def abandon(self) -> None:
        """Close what a forked child inherited."""
        for fd in (self.control, self.pidfd):
            if fd >= 0:
                os.close(fd)


class _Main(_Server):
    """The zygote that imports the script, from the moment it was asked for."""

    def __init__(self, control: socket.socket, key: str) -> None:
        super().__init__(control, -1, -1)
        self.key = key
        self.started = time.monotonic()
        self.reason: str | None = None  # "" once it is ready, otherwise why it cannot be used

    def settle(self, timeout: float) -> bool:
        """Wait until it is ready or has given up; returns whether it is known.

        Raises:
            _GoneError: a file of the zygote that should have forked it has changed.
        """
        deadline = self.started + timeout
        while self.reason is None:
            poller = select.poll()
            poller.register(self.control, select.POLLIN)
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return False
            with self._socket() as control:
                data, ancillary, _, _ = control.recvmsg(1000, socket.CMSG_SPACE(4))
            kind, _, value, _ = HEADER.unpack(data[: HEADER.size]) if data else (b"", 0, 0, 0)
            if kind == b"O":
                raise _GoneError
            if kind == b"H":
                self.pid, self.pidfd = value, int.from_bytes(ancillary[0][2], sys.byteorder)
                guardian.watch(self.pid)
            elif kind == b"R":
                self.reason = ""
            else:
                self.reason = data[HEADER.size :].decode() or "the process that imported it died"
        return True


class _State:
    """The zygotes of one process."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.base: _Server | None = None
        self.base_key: object = None
        self.main: _Main | None = None
        self.spoilt: dict[str, str] = {}  # script -> why it cannot be imported beforehand
        self.last_key = ""
        self.retired: list[_Server] = []

    def server(self, situation: Situation, preparation: dict[str, Any]) -> _Server:
        """Return the zygote to fork from, started where needed.

        Raises:
            _GoneError: try again.
        """
        base = self.ensure_base(situation)
        script = preparation.get("init_main_from_name") or preparation.get("init_main_from_path")
        if script is None or script in self.spoilt:
            return base
        key, last, self.last_key = _key(situation, preparation), self.last_key, _key(situation, preparation)
        if self.main is not None and self.main.key != key:
            if last != key:  # a situation seen for the first time, such as one rank's environment
                return base
            self.drop_main()
        if self.main is None:
            self.start_main(base, key, situation, preparation)
        main = self.main
        assert main is not None
        # As long as torch may take to be imported, and then as long as a script may.
        if not main.settle(COLD_TIMEOUT if main.pid < 0 else MAIN_TIMEOUT):
            main.kill()
            main.reason = f"importing it took more than {MAIN_TIMEOUT:.0f} s"
        if main.reason:
            self.spoilt[script] = main.reason
            self.drop_main()
            return base
        return main

    def ensure_base(self, situation: Situation) -> _Server:
        """Return a living zygote that has the preloads."""
        self.reap()
        key = _base_key(situation)
        if self.base is not None and (self.base_key != key or is_dead(self.base.pidfd)):
            self.drop_all()
        if self.base is None:
            self.base, self.base_key = _start_base(), key
            self.spoilt.clear()
        return self.base

    def start_main(self, base: _Server, key: str, situation: Situation, preparation: dict[str, Any]) -> None:
        """Ask for a main zygote, without waiting for it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        shared = {name: value for name, value in preparation.items() if name not in ("name", "authkey")}
        payload = _to_memory(pickle.dumps((situation, shared)))
        with theirs:
            self.main = _Main(ours, key)
            try:
                base.request(b"M", 0, (theirs.fileno(), payload, _tracker_fd()))
            finally:
                os.close(payload)

    def drop_main(self) -> None:
        if self.main is not None:
            self.main.retire()
            self.retired.append(self.main)
            self.main = None

    def drop_all(self) -> None:
        """Take no more processes from the present zygotes; they end when their children have."""
        self.drop_main()
        if self.base is not None:
            self.base.retire()
            self.retired.append(self.base)
            self.base = None

    def reap(self) -> None:
        for server in self.retired[:]:
            if server.pidfd < 0 or is_dead(server.pidfd):
                server.bury()
                self.retired.remove(server)

    def servers(self) -> list[_Server]:
        return [server for server in (self.base, self.main, *self.retired) if server is not None]


_lock = threading.RLock()
_state: _State | None = None
_preloads: list[str] = ["torch"]


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
    situation, preparation = Situation.capture(), spawn.get_preparation_data("")
    with _lock:
        state = _own_state()
        base = state.ensure_base(situation)
        script = preparation.get("init_main_from_name") or preparation.get("init_main_from_path")
        if state.main is None and script is not None and script not in state.spoilt:
            with contextlib.suppress(_GoneError):
                state.start_main(base, _key(situation, preparation), situation, preparation)


def stop(timeout: float = 5.0) -> None:
    """End this process's zygotes and wait for that; children that still run are left alone, without exit codes."""
    with _lock:
        state = _own_state()
        if state.main is not None and state.main.reason is None:
            with contextlib.suppress(_GoneError):
                state.main.settle(0.0)
        state.drop_all()
        deadline = time.monotonic() + timeout
        for server in state.retired:
            server.kill()
        while state.retired and time.monotonic() < deadline:
            state.reap()
            time.sleep(0.001)


def pids() -> tuple[int, ...]:
    """Pids of this process's zygotes that run now."""
    with _lock:
        state = _own_state()
        state.reap()
        return tuple(server.pid for server in state.servers() if server.pidfd >= 0 and not is_dead(server.pidfd))


def explain() -> str:
    """Say in one sentence which way processes are started now and why; for `torchcrew doctor` and tests."""
    with _lock:
        state = _own_state()
        if state.base is None:
            return "no zygote is running"
        if state.main is not None and state.main.reason == "":
            return "processes are forked with the script imported"
        reasons = [f"; {script} is imported by every process: {why}" for script, why in state.spoilt.items()]
        return "processes are forked with the preloads imported" + "".join(reasons)


class _DupFd:
    """A descriptor on its way to a child."""

    def __init__(self, index: int) -> None:
        self.index = index

    def detach(self) -> int:
        return inherited_fds()[self.index]


class Popen(popen_fork.Popen):
    """One process started from the zygote, as `multiprocessing` handles it."""

    method = "zygote"
    DupFd = _DupFd
    returncode: int | None

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
        preparation: dict[str, Any] = spawn.get_preparation_data(process_obj.name)
        situation = Situation.capture()
        buffer = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump((situation, preparation), buffer)
            reduction.dump(process_obj, buffer)
        finally:
            context.set_spawning_popen(None)
        with _lock:
            for _ in range(4):
                try:
                    self._start(_own_state(), situation, preparation, buffer)
                    return
                except _GoneError:
                    _own_state().drop_all()
        raise RuntimeError(
            "the zygote could not be started: it died or gave no answer, four times. "
            f"Does `{sys.executable} -c 'import torch'` work, and is there memory for one more process?"
        )

    def _start(self, state: _State, situation: Situation, preparation: dict[str, Any], buffer: io.BytesIO) -> None:
        """Have a zygote fork the child, guard it, and let it go."""
        server = state.server(situation, preparation)
        with contextlib.ExitStack() as passed, contextlib.ExitStack() as kept:
            go_r, go_w = _pipe(passed, kept)
            status_w, status_r = reversed(_pipe(kept, passed))
            payload, feed = _payload(buffer, passed, kept)
            flags, streams = _standard_streams()
            tracker = _tracker_fd()
            fds = (payload, go_r, status_w, tracker, *streams, *self._fds)
            number = server.request(b"S", flags, fds)
            kind, value, sentinel = server.reply(number, COLD_TIMEOUT)
            passed.close()
            if kind == b"E":
                raise OSError(value, os.strerror(value))
            if kind != b"S":
                raise _GoneError
            kept.callback(os.close, sentinel)
            guardian.watch(value)
            kept.pop_all()
        self.pid, self.sentinel, self._status = value, sentinel, status_r
        self.finalizer = util.Finalize(self, util.close_fds, (sentinel, status_r))
        os.write(go_w, b"G")
        os.close(go_w)
        if feed is not None:
            # A child that died before it had read all says so by its exit code.
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

    @staticmethod
    def _Popen(process_obj: process.BaseProcess) -> Popen:
        return Popen(process_obj)

    @staticmethod
    def _after_fork() -> None:
        """Nothing, as for a spawned process: what was made up to now is this process's own."""


class ZygoteContext(BaseContext):
    """The context of the start method "zygote"."""

    _name = "zygote"
    Process = ZygoteProcess


class _ChildrensContext(ZygoteContext):
    """The default context of a process that a zygote started; called as the start method it behaves like."""

    _name = "spawn"


def context_for_children() -> ZygoteContext:
    """Return the default context of a process that a zygote started."""
    return _ChildrensContext()


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
            memory = _to_memory(buffer.getbuffer())
            passed.callback(os.close, memory)
            return memory, None
    return _pipe(passed, kept)


def _tracker_fd() -> int:
    """The descriptor of this process's resource tracker, which a child shares, as a spawned one does."""
    resource_tracker.ensure_running()
    fd = resource_tracker.getfd()
    assert fd is not None
    return fd


def _to_memory(data: bytes | memoryview) -> int:
    fd = os.memfd_create("torchcrew-start")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _standard_streams() -> tuple[int, tuple[int, ...]]:
    """Return the descriptors of standard output and error, and a bit for each that is open."""
    numbers = []
    for number in (1, 2):
        with contextlib.suppress(OSError):
            os.fstat(number)
            numbers.append(number)
    return sum(numbers), tuple(numbers)


def _read_exit_code(status: int) -> int:
    """Read a dead child's exit code; 255 when the zygote cannot tell it any more."""
    poller = select.poll()
    poller.register(status, select.POLLIN)
    data = os.read(status, EXIT_CODE.size) if poller.poll(STATUS_TIMEOUT * 1000) else b""
    return int(EXIT_CODE.unpack(data)[0]) if len(data) == EXIT_CODE.size else 255


def _key(situation: Situation, preparation: dict[str, Any]) -> str:
    """All that importing the script could depend on."""
    shared = {name: value for name, value in preparation.items() if name not in ("name", "authkey")}
    return repr((sorted(situation.environ.items()), {**vars(situation), "environ": None}, sorted(shared.items())))


def _base_key(situation: Situation) -> object:
    """All that the zygote's imports depend on, and who its children are."""
    return (
        tuple(_preloads),
        os.getresuid(),
        os.getresgid(),
        sorted(os.getgroups()),
        spawn.get_executable(),
        sorted(
            item for item in situation.environ.items() if item[0].startswith(_READ_AT_LOAD) and item[0] not in _THREADS
        ),
    )


def _start_base() -> _Server:
    """Execute a zygote, without waiting for it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    user = os.pidfd_open(os.getpid())
    group: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {}
    flags: list[str] = util._args_from_interpreter_flags()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)  # stays so over exec: nothing ends it in its first moment
    try:
        ours.send(pickle.dumps((_absolute_path(), tuple(_preloads))))
        child = subprocess.Popen(
            [spawn.get_executable(), *flags, "-c", _PROGRAM, str(theirs.fileno()), str(user)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **_THREADS},
            pass_fds=(theirs.fileno(), user),
            **group,
        )
        child.returncode = 0  # we reap it; without this its finalizer complains that it still runs
        server = _Server(ours, child.pid, os.pidfd_open(child.pid))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(user)
        ours.close()
        theirs.close()
    guardian.watch(server.pid)
    return server


def _absolute_path() -> list[str]:
    return [entry or process.ORIGINAL_DIR or os.getcwd() for entry in sys.path]  # type: ignore[attr-defined]


def _own_state() -> _State:
    """Return this process's state; what a fork inherited is given up."""
    global _state
    if _state is not None and _state.owner != os.getpid():
        _after_fork_in_child()
    if _state is None:
        _register_fork_hooks()
        _state = _State()
    return _state


_hooks_registered = False


def _register_fork_hooks() -> None:
    global _hooks_registered
    if not _hooks_registered:
        _hooks_registered = True
        os.register_at_fork(after_in_child=_after_fork_in_child)


def _after_fork_in_child() -> None:
    # The lock is not taken before a fork, which would have to wait for a start under way: whatever state that left,
    # its descriptors are all that is used of it here.
    global _lock, _state
    _lock = threading.RLock()
    state, _state = _state, None
    if state is not None:
        for server in state.servers():
            server.abandon()
