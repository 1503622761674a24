"""The running zygotes of this process, as it sees them: which one to ask, when to replace one, when one is gone.

    Zygotes (one per process)              zygote                              main zygote
      base    Server ──── control ───────► torch and the preloads ── fork ───► + the script
      main    MainServer ─ control ────────────────────────────────────────────►  not yet known │ ready │ given up
      retired [...]       no control any more; each ends when its last child has, and is buried then

Owner      control sockets and pidfds are this process's; a forked child gives them up and has no zygotes.
Closing    `drop_all` retires them; `reap` buries those that have ended.
Death      a zygote dies: `Gone` from `request` or `reply`, or its pidfd at the next start; another is made.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from multiprocessing import process, resource_tracker, spawn
from multiprocessing import util as _typed_util
from typing import Any

from torchcrew.channel.sockets import QuietSocket, seqpacket_pair
from torchcrew.crew import guardian
from torchcrew.crew.guardian_main import IGNORED, is_dead
from torchcrew.crew.situation import Situation
from torchcrew.crew.zygote_wire import ENVIRON, HEADER, receive, send

__all__ = ("COLD_TIMEOUT", "Gone", "MainServer", "Server", "Zygotes", "script_of", "to_memory", "tracker_fd")

util: Any = _typed_util  # its type hints leave out what start methods use of it

#: How long the first start waits for the zygote, in seconds: importing torch from a cold network disk takes a minute.
COLD_TIMEOUT = 180.0
#: How long a script may take to be imported beforehand, in seconds. One without a main guard may run for hours; after
#: this its children import it themselves, and meet stock's message there.
MAIN_TIMEOUT = 30.0
#: Libraries read these when they are loaded, so a change of one needs another zygote.
_READ_AT_LOAD = ("TORCH_", "PYTORCH_", "ATEN_", "KMP_", "GOMP_", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_")
_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

_PROGRAM = (
    "import pickle, socket, sys; control = socket.socket(fileno=int(sys.argv[1])); "
    "path, preload, grace = pickle.loads(control.recv(1 << 20)); sys.path[:] = path; "
    "from torchcrew.crew.zygote_main import main; main(control, int(sys.argv[2]), preload, grace)"
)


class Gone(Exception):
    """The zygote is dead, or must be replaced because a file it has loaded has changed."""


class Server:
    """A running zygote as its user sees it."""

    def __init__(self, control: QuietSocket, pid: int, pidfd: int) -> None:
        """Take over the user's end of its socket, and its pidfd."""
        self.control = control
        self.pid = pid
        self.pidfd = pidfd
        self.number = 0

    def request(self, kind: bytes, value: int, fds: tuple[int, ...]) -> int:
        """Send a message and return its number.

        Raises:
            Gone: nobody reads it.
        """
        self.number += 1
        try:
            send(self.control, kind, self.number, value, fds)
        except (ConnectionError, TimeoutError) as error:
            raise Gone from error
        return self.number

    def reply(self, number: int, timeout: float) -> tuple[bytes, int, int]:
        """Wait for the answer to a message: kind, value, and a descriptor or -1.

        Raises:
            Gone: the zygote died, or gave no answer in time.
        """
        deadline = time.monotonic() + timeout
        while self._wait(deadline):
            try:
                message = receive(self.control)
            except OSError:
                message = None
            if message is None:
                break
            kind, answered, value, fds = message
            if answered == number:
                return kind, value, fds[0] if fds else -1
            for fd in fds:  # of a start that was interrupted: its child sees that it may not go
                os.close(fd)
        raise Gone

    def _wait(self, deadline: float) -> bool:
        """Whether there is something to receive before the deadline."""
        poller = select.poll()
        poller.register(self.control, select.POLLIN)
        return bool(poller.poll(max(0.0, deadline - time.monotonic()) * 1000))

    def is_alive(self) -> bool:
        """Whether it is known to run."""
        return self.pidfd >= 0 and not is_dead(self.pidfd)

    def retire(self) -> None:
        """Have it end when its last child has; it takes no more requests."""
        if self.control.fileno() >= 0:
            with contextlib.suppress(OSError):
                self.control.setblocking(False)
                send(self.control, b"Q", 0)
            self.control.close()

    def kill(self) -> None:
        """End it at once. Its children run on."""
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

    def descriptors(self) -> tuple[int, ...]:
        """The raw descriptors it has open in this process."""
        return tuple(fd for fd in (self.control.fileno(), self.pidfd) if fd >= 0)


class MainServer(Server):
    """The zygote that imports the script, from the moment it was asked for."""

    def __init__(self, control: QuietSocket, key: str) -> None:
        """Take over the user's end of its socket; ``key`` tells what it was asked for."""
        super().__init__(control, -1, -1)
        self.key = key
        self.started = time.monotonic()
        self.reason: str | None = None  # "" once it is ready, otherwise why it cannot be used

    def settle(self, timeout: float) -> bool:
        """Wait until it is ready or has given up; returns whether it is known.

        Raises:
            Gone: a file of the zygote that should have forked it has changed.
        """
        deadline = self.started + timeout
        while self.reason is None:
            if not self._wait(deadline):
                return False
            data, ancillary, _, _ = self.control.recvmsg(1000, socket.CMSG_SPACE(4))
            kind, _, value, _ = HEADER.unpack(data[: HEADER.size]) if data else (b"", 0, 0, 0)
            if kind == b"O":
                raise Gone
            if kind == b"H":
                self.pid, self.pidfd = value, int.from_bytes(ancillary[0][2], sys.byteorder)
                guardian.watch(self.pid)
            elif kind == b"R":
                self.reason = ""
            else:
                self.reason = data[HEADER.size :].decode() or "the process that imported it died"
        return True


class Zygotes:
    """The zygotes of one process."""

    def __init__(self, preloads: list[str]) -> None:
        """None yet; ``preloads`` are the modules to import, as they will be at the next start."""
        self.owner = os.getpid()
        self.preloads = preloads
        self.base: Server | None = None
        self.base_key: object = None
        self.main: MainServer | None = None
        self.spoilt: dict[str, str] = {}  # script -> why it cannot be imported beforehand
        self.last_key = ""
        self.retired: list[Server] = []

    def choose(self, situation: Situation, preparation: dict[str, Any]) -> Server:
        """Return the zygote to fork from, started where needed.

        Raises:
            Gone: try again.
        """
        base = self.ensure_base(situation)
        script = script_of(preparation)
        if script is None or script in self.spoilt:
            return base
        key, last, self.last_key = _key(situation, preparation), self.last_key, _key(situation, preparation)
        if self.main is not None and self.main.key != key:
            if last != key:  # a situation seen for the first time, such as one rank's environment
                return base
            self.drop_main()
        main = self.main or self.start_main(base, situation, preparation)
        # As long as torch may take to be imported, and then as long as a script may.
        if not main.settle(COLD_TIMEOUT if main.pid < 0 else MAIN_TIMEOUT):
            main.kill()
            main.reason = f"importing it took more than {MAIN_TIMEOUT:.0f} s"
        if main.reason:
            self.spoilt[script] = main.reason
            self.drop_main()
            return base
        return main

    def ensure_base(self, situation: Situation) -> Server:
        """Return a living zygote that has the preloads."""
        self.reap()
        key = _base_key(situation, tuple(self.preloads))
        if self.base is not None and self.base_key != key:
            self.drop_all()
        if self.base is None:
            self.base, self.base_key = _start_base(tuple(self.preloads)), key
            self.spoilt.clear()
        return self.base

    def start_main(self, base: Server, situation: Situation, preparation: dict[str, Any]) -> MainServer:
        """Ask for a main zygote, without waiting for it."""
        ours, theirs = seqpacket_pair()
        payload = to_memory(pickle.dumps((situation, _shared(preparation))))
        with theirs:
            self.main = MainServer(ours, _key(situation, preparation))
            try:
                base.request(b"M", 0, (theirs.fileno(), payload, tracker_fd()))
            finally:
                os.close(payload)
        return self.main

    def drop_main(self) -> None:
        """Take no more processes from the main zygote; it ends when its children have."""
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
        """Bury those that have ended; one that was not asked to leaves no zombie either."""
        if self.base is not None and not self.base.is_alive():
            self.drop_all()
        if self.main is not None and self.main.pidfd >= 0 and not self.main.is_alive():
            self.drop_main()
        for server in self.retired[:]:
            if not server.is_alive():
                server.bury()
                self.retired.remove(server)

    def servers(self) -> list[Server]:
        """All that may run."""
        return [server for server in (self.base, self.main, *self.retired) if server is not None]

    def abandon(self) -> None:
        """Close what a forked child inherited."""
        for server in self.servers():
            server.control.close()
            if server.pidfd >= 0:
                os.close(server.pidfd)


def script_of(preparation: dict[str, Any]) -> str | None:
    """The script that a process with this preparation data imports, by its path or name."""
    return preparation.get("init_main_from_name") or preparation.get("init_main_from_path")


def tracker_fd() -> int:
    """The descriptor of this process's resource tracker, which a child shares, as a spawned one does."""
    resource_tracker.ensure_running()
    fd = resource_tracker.getfd()
    assert fd is not None
    return fd


def to_memory(data: bytes | memoryview) -> int:
    """Return a descriptor from which ``data`` can be read."""
    fd = os.memfd_create("torchcrew-start")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _shared(preparation: dict[str, Any]) -> dict[str, Any]:
    """What is the same for all processes of a script."""
    return {name: value for name, value in preparation.items() if name not in ("name", "authkey", ENVIRON)}


def _key(situation: Situation, preparation: dict[str, Any]) -> str:
    """All that importing the script could depend on."""
    environ = sorted(situation.environ.items())
    return repr((environ, {**vars(situation), "environ": None}, sorted(_shared(preparation).items())))


def _base_key(situation: Situation, preloads: tuple[str, ...]) -> object:
    """All that the zygote's imports depend on, and who its children are."""
    return (
        preloads,
        os.getresuid(),
        os.getresgid(),
        sorted(os.getgroups()),
        spawn.get_executable(),
        sorted(
            item for item in situation.environ.items() if item[0].startswith(_READ_AT_LOAD) and item[0] not in _THREADS
        ),
    )


def _start_base(preloads: tuple[str, ...]) -> Server:
    """Execute a zygote, without waiting for it."""
    ours, theirs = seqpacket_pair()
    user = os.pidfd_open(os.getpid())
    group: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {}
    flags: list[str] = util._args_from_interpreter_flags()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)  # stays so over exec: nothing ends it in its first moment
    try:
        ours.send(pickle.dumps((_absolute_path(), preloads, guardian.grace())))
        with guardian.no_forks():
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
        server = Server(ours, child.pid, os.pidfd_open(child.pid))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(user)
        theirs.close()
    guardian.watch(server.pid)
    return server


def _absolute_path() -> list[str]:
    return [entry or process.ORIGINAL_DIR or os.getcwd() for entry in sys.path]  # type: ignore[attr-defined]
