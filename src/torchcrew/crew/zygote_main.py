"""The zygote's own program: imports torch once and forks the processes that its user asks for.

    zygote (imports torch and the preloads, one thread)         started by `zygote_servers.py`, which has the other side
      ├─ main zygote (imports the script as ``__mp_main__`` too, if that leaves a process which can be forked)
      │    └─ children that start in the same situation                                          zygote_child.py
      └─ children that start in another one, or whose script cannot be imported beforehand

Both serve one SEQPACKET socket each; `zygote_wire.py` lists the messages.

Death      user dies (pidfd): every child's group is killed, then the zygote exits. The guardian does the same.
           zygote dies: children run on; their exit codes are lost.
"""

from __future__ import annotations

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
import sys
import time
import types
import weakref
from dataclasses import replace
from multiprocessing import util as _typed_util
from typing import Any, NoReturn

from torchcrew.crew import zygote_child
from torchcrew.crew.guardian_main import IGNORED
from torchcrew.crew.situation import ThreadPools
from torchcrew.crew.zygote_child import Heritage
from torchcrew.crew.zygote_script import import_script, torch_seed
from torchcrew.crew.zygote_wire import EXIT_CODE, HEADER, StartRequest, receive, send

__all__ = ("Server", "main")

util: Any = _typed_util  # its type hints leave out what `multiprocessing` itself uses of it

#: A stale file is looked for at most so often, in seconds: it costs a millisecond or two.
STALE_CHECK_EVERY = 0.5

Stamp = tuple[int, int, int]


class Server:
    """Forks children on request, and reports how they ended."""

    def __init__(self, control: socket.socket, heritage: Heritage) -> None:
        """Serve ``control``; the modules whose files are looked after are those of this moment."""
        self.control = control
        self.heritage = heritage
        self.children: dict[int, tuple[int, int]] = {}  # pidfd -> pid, status
        self.files = _module_files()
        self.checked = 0.0

    def serve(self) -> NoReturn:
        """Serve until the user's process ends, or until there is nothing left to do for a retired one."""
        poller = select.poll()
        poller.register(self.control, select.POLLIN)
        poller.register(self.heritage.user, select.POLLIN)
        retired = False
        while not (retired and not any(status >= 0 for _, status in self.children.values())):
            ready = {fd for fd, _ in poller.poll()}
            if self.heritage.user in ready:
                time.sleep(self.heritage.grace)
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
            return self.start(number, StartRequest.unpack(value, fds))
        control, payload, tracker = fds
        try:
            return self.start_main(socket.socket(fileno=control), payload, tracker)
        finally:
            os.close(payload)
            os.close(tracker)

    def start(self, number: int, request: StartRequest) -> int | None:
        """Fork a child for a request."""
        pidfd = None
        try:
            if self.is_stale():
                send(self.control, b"O", number)
            else:
                pid = os.fork()
                if pid == 0:
                    zygote_child.be(request, self.heritage, self.give_up_descriptors)
                zygote_child.join_group(pid, request.group)
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

    def be_main(self, control: socket.socket, payload: int, tracker: int) -> NoReturn:
        """Become the zygote that has imported the script; ends this process if that spoils it."""
        self.give_up_descriptors()
        os.setpgid(0, 0)
        pidfd = os.pidfd_open(os.getpid())
        send(control, b"H", 0, os.getpid(), (pidfd,))
        os.close(pidfd)
        zygote_child.set_tracker(tracker)
        with open(payload, "rb") as file:
            situation, preparation = pickle.load(file)
        output = os.memfd_create("output")
        _to(output, 1, 2)
        self.heritage.take_over(situation)
        reason = import_script(preparation, output)
        if reason:
            util._exit_function()  # unlinks the semaphores it made
            control.sendmsg([HEADER.pack(b"X", 0, 0, 0) + reason.encode()], [], socket.MSG_NOSIGNAL)
            os._exit(0)
        os.close(output)
        zygote_child.set_tracker(None)  # the children bring it along; the user's process may end it before
        null = os.open(os.devnull, os.O_RDWR)
        _to(null, 1, 2)
        os.close(null)
        mask = {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)}
        heritage = replace(self.heritage, nofile=_take_all_descriptors(), pools=ThreadPools(), mask=mask)
        server = Server(control, heritage)
        _freeze()
        send(control, b"R", 0, os.getpid())
        server.serve()


def _to(fd: int, *numbers: int) -> None:
    for number in numbers:
        os.dup2(fd, number)


def _take_all_descriptors() -> tuple[int, int]:
    """Raise the soft limit of descriptors to the hard one; returns both as they were."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    return limits


def _freeze() -> None:
    """Keep the collector of every child off the objects that are here now, whose pages are shared until written."""
    gc.collect()
    gc.freeze()


def _stamp(path: str) -> Stamp | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _module_files() -> dict[str, Stamp]:
    """The files of all modules, but for the standard library's and torch's, which nobody edits under a program."""
    torch = sys.modules.get("torch")
    fixed = tuple(
        os.path.dirname(file) + os.sep for file in (os.__file__, getattr(torch, "__file__", None)) if file is not None
    )
    packages = tuple(prefix + "site-packages" for prefix in fixed)
    files: dict[str, Stamp | None] = {}
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


def main(control: socket.socket, user: int, preload: tuple[str, ...], grace: float) -> NoReturn:
    """Be the zygote."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    with open("/proc/self/comm") as file:
        comm = file.read().strip()
    zygote_child.set_comm("torchcrew-zygot")
    # As empty as a spawned process's; `multiprocessing` makes the second name when it is imported.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
    nofile = _take_all_descriptors()
    from torchcrew.crew import zygote

    zygote.register(zygote.get_context())
    _preload(preload)
    _skip_torchs_farewell()
    _freeze()
    Server(control, Heritage(user, comm, nofile, ThreadPools(), torch_seed(), grace)).serve()
