"""What a rank does from its start to its end.

    be_rank(start)
      streams ─ environment and threads ─ recorder ─ process group        all that `fn` may expect to be there
      loop:  Run ─► fn(*args, **kwargs) ─► Returned
                      └─ an exception: report, Failed; then it waits to be ended, its sockets open

Waiting    for the next message, together with the end of the user's process.
Death      of the user's process: the guardian kills this one; where it waits, it ends by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing import process
from multiprocessing import util as _typed_util
from types import SimpleNamespace, TracebackType
from typing import Any, NoReturn

from torchcrew.channel.envelope import Envelope
from torchcrew.crew import rank as ranks
from torchcrew.crew import reports, stacks, zygote
from torchcrew.crew.reports import Report
from torchcrew.crew.situation import ThreadPools
from torchcrew.launcher import failures, group, recorder
from torchcrew.launcher.ledger import Ledger, Phase
from torchcrew.launcher.link import Close, Failed, Guarded, Link, Message, Returned, Run
from torchcrew.launcher.output import Streams

__all__ = ("RankSide", "Start", "be_rank")

util: Any = _typed_util  # its type hints leave out what `multiprocessing` itself uses of it


@dataclass
class Start:
    """All that a rank is given; pickles while a process starts."""

    report: Report  # unpickled first: it reports what goes wrong with the rest
    streams: Streams
    link: Link
    ledger: Ledger
    plan: group.Plan
    environ: dict[str, str]
    method: str
    #: The default start method of the user's process, which shall be that of its ranks; None where nobody has set it.
    default: str | None = None
    #: The user's ends of everything, which a forked rank inherits and must close.
    inherited: list[Any] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "inherited": []}


class RankSide:
    """What a `Crew` is in its ranks."""

    def __init__(self, local: SimpleNamespace) -> None:
        self.local = local
        """Holds what shall survive from one run to the next; each rank has its own."""

    def __reduce__(self) -> Any:
        raise TypeError("a crew's rank cannot send its crew anywhere")


def _rank_side() -> RankSide:
    """Unpickle a crew, in one of its ranks."""
    if _side is None:
        raise RuntimeError("a crew can only be sent to its own ranks, as an argument of its run()")
    return _side


_side: RankSide | None = None


def be_rank(start: Start) -> None:
    """Be one rank, to its end."""
    global _side
    start.streams.take()
    reports.loaded()
    for resource in start.inherited:
        resource.close()
    _side = RankSide(SimpleNamespace())
    member = _Member(start)
    code = 0
    try:
        member.serve()
    except SystemExit as leaving:
        if start.method in ("zygote", "fork"):
            raise
        code = leaving.code if isinstance(leaving.code, int) else 1
        if isinstance(leaving.code, str):
            sys.stderr.write(f"{leaving.code}\n")
    if start.method not in ("zygote", "fork"):
        _leave(code)


def _leave(code: int) -> NoReturn:
    """End this process without the interpreter's own end, in which gloo's destructors may wait for ever."""
    with contextlib.suppress(BaseException):
        util._exit_function()
        atexit._run_exitfuncs()
    util._flush_std_streams()
    os._exit(code & 0xFF)


class _Member:
    """One rank's state."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.plan = start.plan
        self.index = start.plan.local_rank
        self.pid = os.getpid()
        parent = process.parent_process()
        self.user = -1 if parent is None else _death_of(parent, start.method)

    def serve(self) -> None:
        """Take part until there will be no more runs."""
        if not self.may_go():
            return
        try:
            self.prepare()
        except (Exception, KeyboardInterrupt) as error:
            self.fail(error)
        while True:
            try:
                message = self.next_message()
            except EOFError:
                return
            except KeyboardInterrupt as error:
                self.fail(error)
            except Exception as error:
                error.__context__ = None
                self.fail(error, "could not load the function, or its arguments")
            if not isinstance(message, Run):
                return
            self.run(message)
            del message  # the next one may be long in coming, and this one large

    def may_go(self) -> bool:
        """Wait until this process cannot outlive the user's; False when that one is gone before."""
        if self.start.method == "zygote":
            return True
        try:
            return isinstance(self.next_message(), Guarded)
        except EOFError:
            return False

    def prepare(self) -> None:
        """Make everything ready that the function may expect."""
        start = self.start
        with contextlib.suppress(OSError):  # the zygote has done so already
            os.setpgid(0, 0)
        # A group of its own is in the terminal's background: a rank that prints must not be stopped for it.
        for signum in (signal.SIGTTOU, signal.SIGTTIN):
            signal.signal(signum, signal.SIG_IGN)
        start.ledger.set_pid(self.index, os.getpid())
        start.ledger.enter(self.index, Phase.STARTING)
        stacks.offer(f"rank {self.plan.rank}")
        self.take_default_start_method()
        os.environ.update(start.environ)
        if start.method != "zygote":
            ThreadPools().limit()
        group.set_environment(self.plan)
        ranks.become(ranks.Rank(self.index, self.plan.local_world_size))
        recorder.install(start.ledger, self.index, self.plan.first)
        group.make_ready(self.plan)
        start.ledger.enter(self.index, Phase.IDLE)

    def take_default_start_method(self) -> None:
        """Start processes as the user's does: a new process would do so as it was started itself.

        A loader's workers are forked, where the user has not said otherwise, as under torchrun.
        """
        if self.start.default == "zygote":
            zygote.register(zygote.get_context())
        multiprocessing.set_start_method(self.start.default, force=True)

    def next_message(self) -> Message:
        """Wait for a message.

        Raises:
            EOFError: the user's process is gone.
            Exception: whatever unpickling raises.
        """
        link = self.start.link
        while True:
            message = link.receive()
            if message is not None:
                return message
            if not link.wait(*([self.user] if self.user >= 0 else [])):
                raise EOFError

    def run(self, message: Run) -> None:
        """Call the function, and say what became of it."""
        ledger = self.start.ledger
        ledger.enter(self.index, Phase.RUNNING)
        try:
            if message.renew:
                group.renew(self.plan)
            group.begin_run()
            value = self.call(message)
            self.be_no_fork()
            packed = self.pack(message, value)
        except SystemExit:
            raise
        except BaseException as error:
            self.be_no_fork(error)
            self.fail(error)
        ledger.enter(self.index, Phase.RETURNED)
        _flush()
        self.start.link.send(packed)

    @staticmethod
    def pack(message: Run, value: Any) -> Envelope:
        """The answer to a message."""
        try:
            return Link.pack(Returned(message.number, value, group.has_group(), threading.active_count() == 1))
        except Exception as error:
            if hasattr(error, "add_note"):
                name = getattr(message.fn, "__qualname__", repr(message.fn))
                error.add_note(
                    f"This is about what {name} returned, which cannot be sent to the process that called launch or "
                    "run. Of a tensor with a graph return loss.item() or loss.detach(), of a model its state_dict()."
                )
            raise

    @staticmethod
    def call(message: Run) -> Any:
        """The function's value; a function that ends the program with success has returned None."""
        try:
            return message.fn(*message.args, **message.kwargs)
        except SystemExit as leaving:
            if leaving.code is None or (isinstance(leaving.code, int) and leaving.code == 0):
                return None
            raise

    def be_no_fork(self, error: BaseException | None = None) -> None:
        """End a process that the function has forked and that comes out of it, too: it speaks for no rank."""
        if os.getpid() == self.pid:
            return
        if error is not None:
            traceback.print_exception(error)
        _flush()
        os._exit(error is not None)

    def fail(self, error: BaseException, note: str = "") -> NoReturn:
        """Report an exception, and wait to be ended: with this rank's sockets its peers would lose theirs."""
        moment = time.monotonic_ns()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one Ctrl-C is enough
        error.__traceback__ = _without_our_frames(error.__traceback__)
        if note and hasattr(error, "add_note"):
            error.add_note(f"Rank {self.plan.rank} {note}.")
        _flush()
        self.start.report.write(error, pickled=failures.pack(error), moment=moment)
        self.start.ledger.enter(self.index, Phase.FAILED)
        with contextlib.suppress(OSError):
            self.start.link.send(Link.pack(Failed()))
        with contextlib.suppress(BaseException):
            while not isinstance(self.next_message(), Close):
                pass
        os._exit(1)


def _death_of(user: Any, method: str) -> int:
    """A descriptor that is readable when the user's process is gone.

    Stock's is the end of a pipe, whose other end a stray fork of that process may hold.
    """
    if method != "zygote":
        with contextlib.suppress(OSError):  # it is gone
            return os.pidfd_open(user.pid)
    sentinel: int = user.sentinel
    return sentinel


def _flush() -> None:
    """Have out what was printed before the user's process hears of the run's end."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that is the user's; all of it where nothing is."""
    found = trace
    while found is not None and found.tb_frame.f_code.co_filename == __file__:
        found = found.tb_next
    return found or trace
