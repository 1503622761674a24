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
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from multiprocessing import process
from multiprocessing import util as _typed_util
from types import SimpleNamespace, TracebackType
from typing import Any, NoReturn

from torchcrew.crew import rank as ranks
from torchcrew.crew import reports, stacks
from torchcrew.crew.reports import Report
from torchcrew.crew.situation import ThreadPools
from torchcrew.launcher import failures, group, recorder
from torchcrew.launcher.ledger import Ledger, Phase
from torchcrew.launcher.link import Close, Failed, Guarded, Link, Message, Returned, Run
from torchcrew.launcher.output import Streams

__all__ = ("RankSide", "Start", "be_rank")

util: Any = _typed_util  # its type hints leave out what `multiprocessing` itself uses of it

#: How long a failed rank waits to be ended, in seconds, before it ends by itself.
FAILED_TIMEOUT = 30.0


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
        os.environ.update(start.environ)
        if start.method != "zygote":
            ThreadPools().limit()
        group.set_environment(self.plan)
        ranks.become(ranks.Rank(self.index, self.plan.local_world_size))
        recorder.install(start.ledger, self.index, self.plan.first)
        group.make_ready(self.plan)
        start.ledger.enter(self.index, Phase.IDLE)

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
            packed = Link.pack(Returned(message.number, value, group.has_group()))
        except SystemExit:
            raise
        except BaseException as error:
            self.fail(error)
        ledger.enter(self.index, Phase.RETURNED)
        _flush()
        self.start.link.send(packed)

    @staticmethod
    def call(message: Run) -> Any:
        """The function's value; a function that ends the program with success has returned None."""
        try:
            return message.fn(*message.args, **message.kwargs)
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise
            return None

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
        deadline = time.monotonic() + FAILED_TIMEOUT
        with contextlib.suppress(BaseException):
            while time.monotonic() < deadline and not isinstance(self.next_message(), Close):
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


def _without_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that is the user's; all of it where nothing is."""
    found = traceback
    while found is not None and found.tb_frame.f_code.co_filename == __file__:
        found = found.tb_next
    return found or traceback
