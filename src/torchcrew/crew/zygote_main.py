"""The zygote's own program: imports torch once and forks the processes that its user asks for.

    zygote (imports torch and the preloads, one thread)          started by `zygote.py`, which has the other side
      ├─ main zygote (imports the script as ``__mp_main__`` too, if that leaves a process which can be forked)
      │    └─ children that start in the same situation
      └─ children that start in another one, or whose script cannot be imported beforehand

Both serve one SEQPACKET socket each: a request carries the descriptors of a payload (situation, preparation data,
process object), of a pipe that lets the child go when it is guarded, and of one for its exit code.

Death      user dies (pidfd): every child's group is killed, then the zygote exits. The guardian does the same.
           zygote dies: children run on; their exit codes are lost.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import errno
import gc
import importlib
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import time
import types
import weakref
from dataclasses import dataclass, field
from multiprocessing import context, process, resource_tracker, spawn
from multiprocessing import util as _typed_util
from typing import Any, NoReturn

from torchcrew.crew.guardian_main import IGNORED, is_dead
from torchcrew.crew.situation import Situation, ThreadPools

__all__ = ("EXIT_CODE", "FDS_PER_PACKET", "HEADER", "inherited_fds", "main", "receive", "send")

#: Kind, number of the request, a value (pid, errno, flags of the request), number of descriptors in all.
HEADER = struct.Struct("<cQqI")
#: What the pipe of a child's exit code carries.
EXIT_CODE = struct.Struct("<q")
#: The kernel takes 253 descriptors at a time; more follow in further packets.
FDS_PER_PACKET = 250
#: A stale file is looked for at most so often, in seconds: it costs a millisecond or two.
STALE_CHECK_EVERY = 0.5

util: Any = _typed_util  # its type hints leave out what `multiprocessing` itself uses of it
_tracker: Any = resource_tracker._resource_tracker

_PERSONAL = ("name", "authkey", "log_to_stderr", "log_level", "start_method")
_inherited: list[int] = []


def inherited_fds() -> list[int]:
    """The descriptors that `duplicate_for_child` passed to this process, in order."""
    return _inherited


def send(sock: socket.socket, kind: bytes, number: int, value: int = 0, fds: tuple[int, ...] = ()) -> None:
    """Send one message with any number of descriptors."""
    head = HEADER.pack(kind, number, value, len(fds))
    for start in range(0, max(1, len(fds)), FDS_PER_PACKET):
        rights = array.array("i", fds[start : start + FDS_PER_PACKET])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
        sock.sendmsg([head], ancillary, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> tuple[bytes, int, int, list[int]] | None:
    """Receive one message; None at the end."""
    fds: list[int] = []
    while True:
        data, ancillary, _, _ = sock.recvmsg(HEADER.size, socket.CMSG_SPACE(4 * FDS_PER_PACKET))
        if len(data) < HEADER.size:
            return None
        kind, number, value, count = HEADER.unpack(data)
        for _, _, rights in ancillary:
            part = array.array("i")
            part.frombytes(rights)
            fds.extend(part)
        if len(fds) >= count or not ancillary:
            return kind, number, value, fds


@dataclass
class _Snapshot:
    """What importing a script must leave as it was, or the importing process cannot stand for a fresh one."""

    fds: set[str] = field(default_factory=lambda: set(os.listdir("/proc/self/fd")))
    finalizers: int = field(default_factory=lambda: len(util._finalizer_registry))
    random: object = field(default_factory=lambda: _random_state())
    torch_seed: int = field(default_factory=lambda: _torch_seed())
    torch_state: bytes = field(default_factory=lambda: _torch_state())

    def reason_against(self, output: int) -> str:
        """Why a process that imported a script in between must not be forked; "" when it may be."""
        torch: Any = sys.modules.get("torch")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, ValueError):
                stream.flush()
        if len(os.listdir("/proc/self/task")) != 1:
            return "it started threads"
        if torch is not None and torch.cuda.is_initialized():
            return "it initialised CUDA"
        if set(os.listdir("/proc/self/fd")) != self.fds:
            return "it opened or closed files"
        if len(util._finalizer_registry) != self.finalizers or process.active_children() or _has_children():
            return "it made multiprocessing objects or started processes"
        # A script that seeds torch gives every process that seed; one that only draws from it spoils this one.
        if _random_state() != self.random or (_torch_seed() == self.torch_seed and _torch_state() != self.torch_state):
            return "it changed the state of random generators"
        if os.lseek(output, 0, os.SEEK_END):
            return "it wrote to its output"
        return ""


def _torch_seed() -> int:
    torch: Any = sys.modules.get("torch")
    return int(torch.default_generator.initial_seed()) if torch is not None else 0


def _random_state() -> object:
    random, numpy_random = sys.modules.get("random"), sys.modules.get("numpy.random")
    return (
        random.getstate() if random is not None else None,
        pickle.dumps(numpy_random.get_state()) if numpy_random is not None else None,
    )


def _torch_state() -> bytes:
    torch: Any = sys.modules.get("torch")
    return bytes(torch.default_generator.get_state().numpy()) if torch is not None else b""


def _has_children() -> bool:
    with open(f"/proc/self/task/{os.getpid()}/children") as children:
        return bool(children.read().strip())


@dataclass
class _Request:
    """The descriptors of a request to start a process."""

    payload: int
    go: int
    status: int
    tracker: int
    streams: dict[int, int]
    inherited: list[int]

    @classmethod
    def unpack(cls, flags: int, fds: list[int]) -> _Request:
        payload, go, status, tracker, *rest = fds
        streams = {number: rest.pop(0) for number in (1, 2) if flags & number}
        return cls(payload, go, status, tracker, streams, rest)

    def close(self) -> None:
        """Close all but the one for the exit code."""
        for fd in (self.payload, self.go, self.tracker, *self.streams.values(), *self.inherited):
            os.close(fd)


class Server:
    """Forks children on request, and reports how they ended."""

    def __init__(self, control: socket.socket, user: int, comm: str, nofile: tuple[int, int]) -> None:
        """Serve ``control`` for the process of the pidfd ``user``."""
        self.control = control
        self.user = user
        self.comm = comm
        self.nofile = nofile  # a child's limits; ours are as high as they may be
        self.mask: set[int] | None = None  # a child's signal mask, once the script was imported
        self.pools = ThreadPools()
        self.torch_seed = _torch_seed()
        self.children: dict[int, tuple[int, int]] = {}  # pidfd -> pid, status
        self.files = _module_files()
        self.checked = 0.0

    def serve(self) -> NoReturn:
        """Serve until the user's process ends, or until there is nothing left to do for a retired one."""
        poller = select.poll()
        poller.register(self.control, select.POLLIN)
        poller.register(self.user, select.POLLIN)
        retired = False
        while not (retired and not any(status >= 0 for _, status in self.children.values())):
            ready = {fd for fd, _ in poller.poll()}
            if self.user in ready:
                self.kill_children()
                os._exit(0)
            for pidfd in ready & self.children.keys():
                poller.unregister(pidfd)
                self.bury(pidfd)
            if not retired and self.control.fileno() in ready:
                message = receive(self.control)
                if message is None or message[0] == b"Q":
                    retired = True
                    poller.unregister(self.control)
                    self.control.close()
                elif (child := self.answer(*message)) is not None:
                    poller.register(child, select.POLLIN)
        os._exit(0)

    def answer(self, kind: bytes, number: int, value: int, fds: list[int]) -> int | None:
        """Do what a message asks for; returns the pidfd of the new child."""
        if kind == b"S":
            return self.start(number, _Request.unpack(value, fds))
        control, payload, tracker = fds
        try:
            return self.start_main(socket.socket(fileno=control), payload, tracker)
        finally:
            os.close(payload)
            os.close(tracker)

    def start(self, number: int, request: _Request) -> int | None:
        """Fork a child for a request."""
        pidfd = None
        try:
            if self.is_stale():
                send(self.control, b"O", number)
            else:
                pid = os.fork()
                if pid == 0:
                    self.be_child(request)
                with contextlib.suppress(OSError):
                    os.setpgid(pid, pid)
                pidfd = os.pidfd_open(pid)
                self.children[pidfd] = (pid, request.status)
                send(self.control, b"S", number, pid, (pidfd,))
        except OSError as error:
            with contextlib.suppress(OSError):  # the user is gone; its pidfd says so in a moment
                send(self.control, b"E", number, error.errno or errno.EIO)
        if pidfd is None:
            os.close(request.status)
        request.close()
        return pidfd

    def start_main(self, control: socket.socket, payload: int, tracker: int) -> int | None:
        """Fork the zygote that imports the script."""
        with control:
            try:
                if self.is_stale():
                    send(control, b"O", 0)
                    return None
                pid = os.fork()
            except OSError:
                return None  # seen as an end of file
            if pid == 0:
                try:
                    self.be_main(socket.socket(fileno=control.detach()), payload, tracker)
                finally:
                    os._exit(1)
            pidfd = os.pidfd_open(pid)
            self.children[pidfd] = (pid, -1)
            return pidfd

    def bury(self, pidfd: int) -> None:
        """Reap a child and pass its exit code on."""
        pid, status = self.children.pop(pidfd)
        _, result = os.waitpid(pid, 0)
        os.close(pidfd)
        if status >= 0:
            with contextlib.suppress(OSError):
                os.write(status, EXIT_CODE.pack(os.waitstatus_to_exitcode(result)))
            os.close(status)

    def kill_children(self) -> None:
        """Kill every child and its group; they are ours to reap, so no number can have been used again."""
        for pid, _ in self.children.values():
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(OSError):
                    kill(pid, signal.SIGKILL)

    def is_stale(self) -> bool:
        """Whether the file of a loaded module has changed."""
        now = time.monotonic()
        if now - self.checked < STALE_CHECK_EVERY:
            return False
        self.checked = now
        return any(_stamp(path) != stamp for path, stamp in self.files.items())

    def give_up_descriptors(self) -> None:
        """In a forked process: close what belongs to the forking one. The user's pidfd stays."""
        self.control.close()
        for pidfd, (_, status) in self.children.items():
            os.close(pidfd)
            if status >= 0:
                os.close(status)
        self.children = {}

    def be_main(self, control: socket.socket, payload: int, tracker: int) -> None:
        """Become the zygote that has imported the script; ends this process if that spoils it."""
        self.give_up_descriptors()
        self.control = control
        os.setpgid(0, 0)
        pidfd = os.pidfd_open(os.getpid())
        send(control, b"H", 0, os.getpid(), (pidfd,))
        os.close(pidfd)
        _tracker._fd = os.dup(tracker)
        with open(payload, "rb", closefd=False) as file:
            situation, preparation = pickle.load(file)
        output = os.memfd_create("output")
        for number in (1, 2):
            os.dup2(output, number)
        reason = self.import_main(situation, preparation, output)
        if reason:
            util._exit_function()  # unlinks the semaphores it made
            control.sendmsg([HEADER.pack(b"X", 0, 0, 0) + reason.encode()], [], socket.MSG_NOSIGNAL)
            os._exit(0)
        os.close(output)
        _to_devnull(1, 2)
        if "OPENBLAS_NUM_THREADS" in os.environ:
            os.putenv("OPENBLAS_NUM_THREADS", os.environ["OPENBLAS_NUM_THREADS"])
        else:
            os.unsetenv("OPENBLAS_NUM_THREADS")
        self.pools = ThreadPools()
        self.mask = {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)}
        self.nofile = resource.getrlimit(resource.RLIMIT_NOFILE)
        _raise_nofile()
        self.files = _module_files()
        _freeze()
        send(control, b"R", 0, os.getpid())
        self.serve()

    def import_main(self, situation: Situation, preparation: dict[str, Any], output: int) -> str:
        """Import the script as a spawned child does; returns why it cannot be used, or ""."""
        snapshot = None
        process.current_process()._inheriting = True  # type: ignore[attr-defined]
        try:
            self.become(situation)
            mains = {key: preparation.pop(key) for key in tuple(preparation) if key.startswith("init_main")}
            spawn.prepare(preparation)
            snapshot = _Snapshot()
            # OpenBLAS starts threads when it is loaded; only C code sees this, and the child gives it the right number.
            os.putenv("OPENBLAS_NUM_THREADS", "1")
            spawn.prepare(mains)
        except BaseException as error:
            # The children will meet it themselves, and say so where the user can read it.
            return f"importing it raised {type(error).__name__}"
        finally:
            del process.current_process()._inheriting  # type: ignore[attr-defined]
        return snapshot.reason_against(output)

    def become(self, situation: Situation) -> None:
        """Take over what a spawned process would have from the user's process."""
        resource.setrlimit(resource.RLIMIT_NOFILE, self.nofile)
        situation.apply()
        self.pools.apply_openmp()

    def be_child(self, request: _Request) -> NoReturn:
        """Be the process that was asked for, to its end."""
        code = 1
        try:
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
            self.give_up_descriptors()
            os.close(request.status)
            if not _may_go(request.go, self.user):
                os._exit(1)
            code = self.run_child(request)
        except SystemExit as error:
            code = _exit_code(error)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            # A spawned process ends as every interpreter does; the rest of that would only free memory.
            with contextlib.suppress(BaseException):
                atexit._run_exitfuncs()
            util._flush_std_streams()
            os._exit(code & 0xFF)

    def run_child(self, request: _Request) -> int:
        """Prepare as `multiprocessing.spawn` does and run the process object."""
        global _inherited
        for number in (1, 2):
            if number in request.streams:
                os.dup2(request.streams[number], number)
                os.close(request.streams[number])
            else:
                os.close(number)
        _inherited = request.inherited
        _tracker._fd = request.tracker
        _set_comm(self.comm)
        _restore_streams()
        _forget_the_zygotes_past(self.torch_seed)
        process.current_process()._inheriting = True  # type: ignore[attr-defined]
        try:
            with open(request.payload, "rb") as file:
                situation, preparation = pickle.load(file)
                if self.mask is None:
                    self.become(situation)
                else:  # the script was imported in the same situation; what it changed then shall stay
                    resource.setrlimit(resource.RLIMIT_NOFILE, self.nofile)
                    signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
                    preparation = {key: preparation[key] for key in _PERSONAL if key in preparation}
                self.pools.apply()
                spawn.prepare(preparation)
                process_object = pickle.load(file)
        finally:
            del process.current_process()._inheriting  # type: ignore[attr-defined]
        code: int = process_object._bootstrap(self.user)
        return code


def _may_go(go: int, user: int) -> bool:
    """Wait until the user's process has this one guarded; False when it died or gave up before."""
    poller = select.poll()
    poller.register(go, select.POLLIN)
    poller.register(user, select.POLLIN)
    poller.poll()
    try:
        return not is_dead(user) and os.read(go, 1) != b""
    finally:
        os.close(go)


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    sys.stderr.write(f"{error.code}\n")
    return 1


def _forget_the_zygotes_past(torch_seed: int) -> None:
    """Drop what a spawned process would not have: finalizers of the zygote's objects, its random state."""
    util._finalizer_registry.clear()
    util._run_after_forkers()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # Python's own generator is seeded anew by fork itself
    torch: Any = sys.modules.get("torch")
    if torch is not None and _torch_seed() == torch_seed:  # not the script's
        torch.default_generator.seed()


def _restore_streams() -> None:
    """Buffer standard output as a new interpreter would for the file it now writes to."""
    stream: Any = sys.stdout
    with contextlib.suppress(AttributeError, ValueError, OSError):
        if not stream.write_through:
            stream.reconfigure(line_buffering=os.isatty(1))


def _to_devnull(*numbers: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for number in numbers:
        os.dup2(null, number)
    os.close(null)


def _set_comm(name: str) -> None:
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write(name)


def _raise_nofile() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _freeze() -> None:
    """Keep the collector of every child off the objects that are here now, whose pages are shared until written."""
    gc.collect()
    gc.freeze()


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _module_files() -> dict[str, tuple[int, int, int] | None]:
    """The files of all modules, but for the standard library's and torch's, which nobody edits under a program."""
    torch = sys.modules.get("torch")
    fixed = tuple(
        os.path.dirname(file) + os.sep for file in (os.__file__, getattr(torch, "__file__", None)) if file is not None
    )
    packages = tuple(prefix + "site-packages" for prefix in fixed)
    files: dict[str, tuple[int, int, int] | None] = {}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and (not path.startswith(fixed) or path.startswith(packages)):
            files[path] = _stamp(path)
    return {path: stamp for path, stamp in files.items() if stamp is not None}


def _preload(names: tuple[str, ...]) -> None:
    for name in names:
        # A child that needs a module which cannot be imported says so itself.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random")  # loaded now, so that its state can be compared and made anew


def _skip_torchs_farewell() -> None:
    """Keep a child's exit from unregistering torch's operators one by one, 50 ms for nothing."""
    for finalizer, info in weakref.finalize._registry.items():  # type: ignore[attr-defined]
        if getattr(info.func, "__module__", None) == "torch.library":
            finalizer.atexit = False


def main(control: socket.socket, user: int, preload: tuple[str, ...]) -> NoReturn:
    """Be the zygote."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    with open("/proc/self/comm") as file:
        comm = file.read().strip()
    _set_comm("torchcrew-zygot")
    # As empty as a spawned process's; `multiprocessing` makes the second name when it is imported.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
    nofile = resource.getrlimit(resource.RLIMIT_NOFILE)
    _raise_nofile()
    from torchcrew.crew import zygote

    # In a child the default is a context that calls itself "spawn", whose semantics it has: a stock child of it is told
    # that name, and knows no other.
    context._concrete_contexts["zygote"] = zygote.context_for_children()  # type: ignore[attr-defined]
    _preload(preload)
    _skip_torchs_farewell()
    _freeze()
    Server(control, user, comm, nofile).serve()
