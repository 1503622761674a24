"""How a process object becomes a process, for each start method.

    method                     class              who forks                     guarded by
    fork                       ForkPopen          this process                  our guardian, before it runs
    spawn, forkserver, zygote  Served             the zygote                    our guardian, before it runs
    spawn by exec              SpawnPopen         this process, which execs     our guardian, from its first moment on
    forkserver by exec         ForkServerPopen    the library's fork server     the same

Every child is in this process's group, as stock's are, so that the terminal's Ctrl-C reaches it.

Owner      of sentinels and pipes: the `Popen`, until `close` or its end.
Death      this process dies: the guardian kills its children, and their guardians kill theirs. A forked child waits
           with its first step until it is guarded, on a pipe and on this process's pidfd.
           a child dies: `poll` reaps it, tells the guardian, and notes how it ended (`children`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from multiprocessing import popen_fork, popen_forkserver, popen_spawn_posix, process
from typing import Any

from torchcrew.crew import functions, guardian, zygote
from torchcrew.crew.foresight import expected_imports
from torchcrew.crew.zygote_child import may_go
from torchcrew.multiprocessing import children
from torchcrew.multiprocessing.forking import warn_of_dangers

__all__ = (
    "START_VARIABLE",
    "ForkPopen",
    "ForkServerPopen",
    "Served",
    "ServedForkServer",
    "ServedSpawn",
    "SpawnPopen",
    "get_start",
    "set_start",
)

START_VARIABLE = "TORCHCREW_START"
"""``zygote`` (as when it is not set) or ``exec``: how spawn and forkserver start processes."""

_STARTS = ("zygote", "exec")


def get_start() -> str:
    """Return how spawn and forkserver start processes: "zygote" or "exec".

    Raises:
        ValueError: the variable ``TORCHCREW_START`` says something else.
    """
    return _checked(os.environ.get(START_VARIABLE) or _STARTS[0], START_VARIABLE)


def set_start(how: str) -> None:
    """Say how spawn and forkserver start processes, in this process and in those that it starts from now on.

    Args:
        how: "zygote", as at the beginning: forked from a process that has torch imported, in milliseconds. "exec":
            the standard library's own ways, with a new interpreter for each process (spawn) or for the fork server.

    Raises:
        ValueError: for anything else.
    """
    os.environ[START_VARIABLE] = _checked(how, "how")


def _checked(how: str, what: str) -> str:
    if how not in _STARTS:
        raise ValueError(f"{what} is {how!r}, but should be 'zygote' or 'exec'")
    return how


class _Recorded(popen_fork.Popen):
    """Notes how the child ended."""

    child: children.Child | None = None

    def __init__(self, process_obj: process.BaseProcess) -> None:
        super().__init__(process_obj)
        # The exit code of other objects, as of a stock process whose default method is the zygote, is read unnoticed.
        if hasattr(process_obj, "_exit_code_is_watched"):
            self.child = children.started(process_obj, self.pid)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code, None while the process runs; waits for its end unless ``flag`` is ``os.WNOHANG``."""
        code: int | None = super().poll(flag)
        if code is not None and self.child is not None:
            self.child.ended(code)
        return code

    def _send_signal(self, sig: int) -> None:
        if self.child is not None:
            self.child.dismiss()
        super()._send_signal(sig)  # type: ignore[misc]


class _Guarded(popen_fork.Popen):
    """Has the child killed when this process dies."""

    #: Somebody else has reaped it; as with stock, there is no exit code then.
    _is_lost = False

    def _guard(self) -> None:
        guardian.watch(self.pid, own_group=False)
        self._is_guarded = True

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        code: int | None = super().poll(flag)
        if (code is not None or self._is_lost) and vars(self).pop("_is_guarded", False):  # by one thread only
            guardian.forget(self.pid)
        return code


class _Forked(_Guarded):
    """A guarded child of this process, that may be waited for in any thread."""

    def __init__(self, process_obj: process.BaseProcess) -> None:
        self._reaping = threading.Lock()
        super().__init__(process_obj)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            # Waited for without reaping first, so that no thread sees the child gone before its exit code is here.
            try:
                if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | (flag & os.WNOHANG)) is None:
                    return None
            except ChildProcessError:
                self._is_lost = True
            with self._reaping:
                super().poll(os.WNOHANG)
        return self.returncode


class _Held:
    """A process object whose child waits, before anything else, until it may go."""

    def __init__(self, process_obj: process.BaseProcess, go_r: int, go_w: int, user: int) -> None:
        self._process: Any = process_obj
        self._descriptors = go_r, go_w, user

    def _bootstrap(self, parent_sentinel: int) -> int:
        go_r, go_w, user = self._descriptors
        os.close(go_w)
        if not may_go(go_r, user):
            return 1
        os.close(user)
        code: int = self._process._bootstrap(parent_sentinel=parent_sentinel)
        return code


class ForkPopen(_Recorded, _Forked):
    """One process started by fork."""

    method = "fork"

    def _launch(self, process_obj: process.BaseProcess) -> None:
        warn_of_dangers(getattr(process_obj, "_target", None))
        with contextlib.ExitStack() as stack:
            go_r, go_w = os.pipe()
            stack.callback(os.close, go_r)
            stack.callback(os.close, go_w)
            user = os.pidfd_open(os.getpid())
            stack.callback(os.close, user)
            super()._launch(_Held(process_obj, go_r, go_w, user))  # type: ignore[misc]
            try:
                self._guard()
                os.write(go_w, b"G")
            except BaseException:
                stack.close()  # it may not go, and ends
                os.waitpid(self.pid, 0)
                self.close()
                raise


class _ByExec(_Recorded, _Guarded):
    """Started as the standard library does it, and guarded."""

    def _launch(self, process_obj: process.BaseProcess) -> None:
        super()._launch(process_obj)  # type: ignore[misc]
        try:
            self._guard()
        except BaseException:
            self.kill()
            self.wait()
            raise


class SpawnPopen(_ByExec, _Forked, popen_spawn_posix.Popen):
    """One process started by executing an interpreter."""


class ForkServerPopen(_ByExec, popen_forkserver.Popen):
    """One process started by the standard library's fork server."""


class Served(_Recorded, zygote.Popen):
    """One process started from the zygote."""

    own_group = False
    dump = staticmethod(functions.dump)

    def _launch(self, process_obj: process.BaseProcess) -> None:
        zygote.preload(*expected_imports((getattr(process_obj, "_target", None), *getattr(process_obj, "_args", ()))))
        super()._launch(process_obj)


class ServedSpawn(Served):
    """The same for the start method "spawn"."""

    method = "spawn"


class ServedForkServer(Served):
    """The same for the start method "forkserver"."""

    method = "forkserver"
