"""What a process that a zygote forked does before its process object runs, and how it ends.

    zygote ── fork ──► child   be()
                        │ own process group, or the user's; close what is the zygote's
                        │ wait for the byte on `go`: the user's process has this one guarded
                        │ streams, resource tracker, fresh random generators
                        │ take over the user's situation, import the script   (main zygote's child: done already)
                        │ unpickle the process object
                        ▼
                       its `_bootstrap`, exit handlers, flush, `_exit`

Death      of the user before the byte came: the child exits, nothing of it has run. Later: the guardian kills it.
           of the zygote: nothing; the exit code is lost.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import resource
import select
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import process, resource_tracker, spawn
from multiprocessing import util as _typed_util
from typing import Any, NoReturn

from torchcrew.crew import stacks, zygote_wire
from torchcrew.crew.guardian_main import is_dead
from torchcrew.crew.situation import Situation, ThreadPools
from torchcrew.crew.zygote_script import renew_generators
from torchcrew.crew.zygote_wire import ENVIRON, StartRequest

__all__ = ("Heritage", "be", "join_group", "may_go", "set_comm", "set_tracker")

util: Any = _typed_util  # its type hints leave out what `multiprocessing` itself uses of it

#: What of the preparation data is a process's own, and not the script's import's.
_PERSONAL = ("name", "authkey", "log_to_stderr", "log_level", "start_method")


@dataclass
class Heritage:
    """What a zygote leaves to its children."""

    user: int
    """Pidfd of the user's process."""
    comm: str
    """Name of the interpreter, as ``ps`` shows it."""
    nofile: tuple[int, int]
    """A child's limits for descriptors; the zygote's own are as high as they may be."""
    pools: ThreadPools
    torch_seed: int
    """torch's seed before anybody but torch could set it."""
    grace: float
    """How many seconds a child may outlive the user's process."""
    mask: set[int] | None = None
    """A child's signal mask, once the script was imported."""

    def take_over(self, situation: Situation) -> None:
        """Give this process what a spawned one would have from the user's process."""
        resource.setrlimit(resource.RLIMIT_NOFILE, self.nofile)
        situation.apply()
        self.pools.apply_openmp()


def be(request: StartRequest, heritage: Heritage, give_up: Callable[[], None]) -> NoReturn:
    """Be the process that was asked for, to its end.

    Args:
        give_up: closes what belongs to the zygote.
    """
    code = 1
    try:
        join_group(0, request.group)
        give_up()
        os.close(request.status)
        if not may_go(request.go, heritage.user):
            os._exit(1)
        code = _run(request, heritage)
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


def join_group(pid: int, group: int) -> None:
    """Put a process (0: this one) into a process group; into one of its own for 0, or where it may not be in that one.

    The child and who forked it both do so: whoever is faster.
    """
    for wanted in (group, 0):
        with contextlib.suppress(OSError):  # another session's, or it has no member left
            os.setpgid(pid, wanted)
            return


def may_go(go: int, user: int) -> bool:
    """Wait until the user's process has this one guarded; False when it died or gave up before. Closes ``go``."""
    poller = select.poll()
    poller.register(go, select.POLLIN)
    poller.register(user, select.POLLIN)
    poller.poll()
    try:
        return not is_dead(user) and os.read(go, 1) != b""
    finally:
        os.close(go)


def _run(request: StartRequest, heritage: Heritage) -> int:
    """Prepare as `multiprocessing.spawn` does and run the process object."""
    _take_streams(request.streams)
    zygote_wire.inherited_fds[:] = request.inherited
    set_tracker(request.tracker)
    set_comm(heritage.comm)
    # A spawned process would not have the finalizers of the zygote's objects.
    util._finalizer_registry.clear()
    util._run_after_forkers()
    renew_generators(heritage.torch_seed)
    process.current_process()._inheriting = True  # type: ignore[attr-defined]
    try:
        process_object = _load(request.payload, heritage)
    finally:
        del process.current_process()._inheriting  # type: ignore[attr-defined]
    stacks.offer(process_object.name, process_object._parent_pid)
    code: int = process_object._bootstrap(heritage.user)
    return code


def _load(payload: int, heritage: Heritage) -> Any:
    """Prepare for the process object, and unpickle it."""
    with open(payload, "rb") as file:
        situation, preparation = pickle.load(file)
        stacks.offer(preparation["name"])  # what follows may hang: it imports the user's modules
        environ = preparation.pop(ENVIRON)
        if heritage.mask is None:
            heritage.take_over(situation)
        else:  # the script was imported in the same situation; what it changed then shall stay
            resource.setrlimit(resource.RLIMIT_NOFILE, heritage.nofile)
            signal.pthread_sigmask(signal.SIG_SETMASK, heritage.mask)
            preparation = {key: preparation[key] for key in _PERSONAL if key in preparation}
        if environ:
            os.environ.update(environ)
            heritage.pools.apply_environment()
        heritage.pools.apply()
        spawn.prepare(preparation)
        return pickle.load(file)


def _take_streams(streams: dict[int, int]) -> None:
    """Write where the user's process writes, buffered as a new interpreter would for such a file."""
    for number in (1, 2):
        if number in streams:
            os.dup2(streams[number], number)
            os.close(streams[number])
        else:
            os.close(number)
    stream: Any = sys.stdout
    with contextlib.suppress(AttributeError, ValueError, OSError):
        if not stream.write_through:
            stream.reconfigure(line_buffering=os.isatty(1))


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    sys.stderr.write(f"{error.code}\n")
    return 1


def set_tracker(fd: int | None) -> None:
    """Share the resource tracker of the user's process, which lives as long as somebody does; None: no longer."""
    tracker: Any = resource_tracker._resource_tracker
    inherited, tracker._fd = tracker._fd, fd
    if inherited is not None:
        os.close(inherited)


def set_comm(name: str) -> None:
    """Be called so by ``ps`` and ``top``."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write(name)
