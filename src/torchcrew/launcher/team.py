"""Ranks that run, and the loop of the user's process that waits for them.

    Team(options, ...)   starts the ranks
      run(message)       one thread, one poll: links, pidfds, output, the clock
                           every rank returned ─► values         one failed or died ─► first cause ─► end all ─► raise
      close()            ask ─► SIGTERM ─► SIGKILL

Owner      of processes, pidfds (the guardian's), our ends of the links, the reports, the ledger, the output pipes, and
           the socket that keeps MASTER_PORT for the ranks.
Closing    `close` or `end`, both idempotent; no rank runs after them, nor what is in its process group.
Death      of a rank: its pidfd, whatever it was doing. Of this process: the guardian kills the ranks' groups.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

from torchcrew.crew import guardian, zygote
from torchcrew.crew.guardian_main import is_dead, signal_group
from torchcrew.crew.rendezvous import Rendezvous
from torchcrew.crew.reports import Report, first
from torchcrew.errors import RanksStuck
from torchcrew.launcher import failures, hang
from torchcrew.launcher.failures import End
from torchcrew.launcher.group import Plan
from torchcrew.launcher.ledger import Ledger
from torchcrew.launcher.link import Close, Failed, Guarded, Link, Returned, Run
from torchcrew.launcher.member import Start, be_rank
from torchcrew.launcher.options import Host, Options
from torchcrew.launcher.output import Output

__all__ = ("Member", "Team")

#: How long to wait for the rank that was the cause, in seconds, where a failure seen is a mere consequence of it.
CAUSE_TIMEOUT = 0.5
#: After a failure: how long SIGTERM may take, in seconds. Ranks that wait in native code end at once or never.
TERMINATE_TIMEOUT = 0.25
#: After Ctrl-C: how long ranks get for their `finally` and `except`, in seconds.
INTERRUPT_TIMEOUT = 1.0
#: How long ranks may take to end when they are asked to, in seconds: their exit handlers, and threads of the user's.
CLOSE_TIMEOUT = 5.0
#: How long SIGKILL may take, in seconds; a process in uninterruptible sleep is left behind then.
KILL_TIMEOUT = 5.0
#: How often progress is looked for, in seconds, where a timeout is given.
LOOK_EVERY = 0.1


@dataclass
class Member:
    """A rank, as the user's process sees it."""

    rank: int
    process: Any
    link: Link
    report: Report
    pid: int
    pidfd: int | None = None
    """None for one that was gone before it could be watched."""

    def is_gone(self) -> bool:
        """Whether it has ended."""
        return self.pidfd is None or is_dead(self.pidfd)

    def signal(self, signum: int) -> None:
        """Signal it, and all that is in its process group."""
        if self.pidfd is not None:
            signal_group(self.pid, self.pidfd, signum)

    def let_go(self) -> None:
        """Reap it, and close what there is for it: an error's traceback may keep this object for long."""
        self.process.join(KILL_TIMEOUT)
        self.pidfd = None
        guardian.forget(self.pid)
        with contextlib.suppress(ValueError):  # it could not be killed
            self.process.close()


class Team:
    """Started ranks."""

    def __init__(self, options: Options, host: Host | None = None, restart: int = 0) -> None:
        """Start them; returns before they are ready.

        Args:
            options: how.
            host: the place of this machine, if others take part.
            restart: how often they were started before.

        Raises:
            Exception: whatever starting one raises; none runs then.
        """
        self.options = options
        self.count = options.ranks()
        self.members: list[Member] = []
        self.closed = False
        self._runner: int | None = None  # the thread that is in `run`
        self._let_run = threading.Event()  # it is not
        self._interrupted = False
        #: An eventfd: somebody wants to know where the ranks are.
        self.asked = -1
        self._port: socket.socket | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self.end)
            self.output = Output(self.count, options.logs, 0 if host is None else host.first)
            self.ledger = Ledger.create(self.count)
            self._start_all(host, restart)
            undo.pop_all()

    # Starting ---------------------------------------------------------------------------------------------------------

    def _start_all(self, host: Host | None, restart: int) -> None:
        environ = self.output.environment() | self.options.environment(self.count)
        rendezvous = None
        if host is None:
            self._port = _reserve_port()
            address = self._port.getsockname()
            rendezvous = Rendezvous()
        else:
            address = host.address, host.port
        try:
            for index in range(self.count):
                self._start(self._plan(index, host, restart, address, rendezvous), environ)
        finally:
            if rendezvous is not None:
                rendezvous.close()

    def _plan(
        self, index: int, host: Host | None, restart: int, address: tuple[str, int], rendezvous: Rendezvous | None
    ) -> Plan:
        first_rank = 0 if host is None else host.first
        return Plan(
            rank=first_rank + index,
            world_size=self.count if host is None else host.world_size,
            local_rank=index,
            local_world_size=self.count,
            first=first_rank,
            backend=self.options.backend_for(self.count),
            address=address,
            rendezvous=rendezvous,
            env=_elastic_variables(self.options, host, restart),
        )

    def _start(self, plan: Plan, environ: dict[str, str]) -> None:
        method = self.options.start_method
        context: Any = zygote.get_context() if method == "zygote" else multiprocessing.get_context(method)
        ours, theirs = Link.pair()
        inherited = [ours, *(member.link for member in self.members)]
        report = Report()
        streams = self.output.streams(plan.local_rank)
        start = Start(report, streams, theirs, self.ledger, plan, environ, method, inherited)
        process = context.Process(target=be_rank, args=(start,), name=f"rank {plan.rank}")
        process.environ = environ
        process.start()
        member = Member(plan.rank, process, ours, report, process.pid)
        self.members.append(member)
        member.pidfd = guardian.watch(process.pid)
        theirs.close()
        if method != "zygote":  # whose processes wait for their guard before anything of them runs
            with contextlib.suppress(OSError):  # it is gone, which its pidfd says
                ours.send(Link.pack(Guarded()))
        self.output.started(plan.local_rank)

    # Running ----------------------------------------------------------------------------------------------------------

    def run(self, message: Run) -> list[Returned]:
        """Have every rank run it.

        Returns:
            What each rank returned, in the order of the ranks.

        Raises:
            Exception: the first failure of a rank, see `failures.error`; all ranks have ended then.
            RanksStuck: no rank made any progress for as long as ``timeout`` says; the same.
            BaseException: whatever interrupts this; the same.
        """
        packed = Link.pack(message)
        self._runner = threading.get_ident()
        self._let_run.clear()
        try:
            for member in self.members:
                with contextlib.suppress(OSError):  # it is gone, which its pidfd says
                    member.link.send(packed)
            del packed
            with _explaining(self):
                return self._collect()
        except KeyboardInterrupt:
            self.end(signal.SIGINT, INTERRUPT_TIMEOUT)
            raise
        except BaseException:
            self.end()
            if self._interrupted:
                raise RuntimeError("this crew was closed while its ranks ran") from None
            raise
        finally:
            self._runner = None
            self._let_run.set()

    def _collect(self) -> list[Returned]:
        returned: dict[int, Returned] = {}
        watch = _Watch(self)
        while len(returned) < self.count:
            failed = self._look(returned, watch.left())
            if failed:
                raise self._failure(failed)
            watch.look()
        self.output.drain()
        return [returned[index] for index in range(self.count)]

    def _look(self, returned: dict[int, Returned], timeout: float | None, known: Container[int] = ()) -> set[int]:
        """Wait until something happens, and take what came; returns the ranks that have failed, but for ``known``."""
        poller = select.poll()
        outputs = set(self.output.descriptors())
        for fd in outputs:
            poller.register(fd, select.POLLIN)
        members = {index: member for index, member in enumerate(self.members) if index not in known}
        for member in members.values():
            poller.register(member.link, select.POLLIN)
            if member.pidfd is not None:
                poller.register(member.pidfd, select.POLLIN)
        if self.asked >= 0:
            poller.register(self.asked, select.POLLIN)
        deadline = self.output.deadline()
        if deadline is not None:
            timeout = min(max(0.0, deadline - time.monotonic()), 3600.0 if timeout is None else timeout)
        ready = {fd for fd, _ in poller.poll(None if timeout is None else timeout * 1000)}
        for fd in ready & outputs:
            self.output.read(fd)
        self.output.tick()
        if self.asked in ready:
            os.eventfd_read(self.asked)
            self.output.say(self.explain())
        return {
            index
            for index, member in members.items()
            if ready & {member.link.fileno(), member.pidfd} or member.pidfd is None
            if self._take(index, returned)
        }

    def _take(self, index: int, returned: dict[int, Returned]) -> bool:
        """Take what a rank has sent; whether it has failed."""
        member = self.members[index]
        gone = member.is_gone()  # before the last look at what it has sent
        try:
            while (message := member.link.receive()) is not None:
                if isinstance(message, Failed):
                    return True
                if isinstance(message, Returned):
                    returned[index] = message
        except EOFError:
            # It is about to end, or has closed a descriptor that is not its own.
            gone = True
            if member.pidfd is not None:
                _wait_for([member.pidfd], KILL_TIMEOUT)
        return gone

    # Failing ----------------------------------------------------------------------------------------------------------

    def _failure(self, failed: set[int]) -> Exception:
        """The error for the first failure; all ranks have ended then."""
        deadline = time.monotonic() + CAUSE_TIMEOUT
        while True:
            failed = failed | {i for i, m in enumerate(self.members) if m.is_gone() or m.report.read() is not None}
            ends = {index: self._end_of(index) for index in sorted(failed)}
            cause = first(
                {index: end.failure for index, end in ends.items()},
                {index for index, end in ends.items() if failures.signal_name(end.exitcode)},
            )
            left = deadline - time.monotonic()
            if not failures.is_consequence(ends[cause]) or len(failed) == self.count or left <= 0:
                break
            failed |= self._look({}, min(left, LOOK_EVERY), known=failed)
        self.output.drain(wait=False)  # the last words of a rank belong to its error
        end = self._end_of(cause)
        self.end()
        return failures.error(end)

    def _end_of(self, index: int) -> End:
        member = self.members[index]
        code = None
        if member.is_gone():
            member.process.join(KILL_TIMEOUT)
            code = member.process.exitcode
        return End(member.rank, member.pid, code, member.report.read(), self.output.tail(index))

    # Ending -----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ask the ranks to end, and see to it; idempotent. A `run` of another thread is ended at once."""
        if self.closed:
            return
        if self._runner is not None:
            self._interrupt()
            return
        try:
            packed = Link.pack(Close())
            for member in self.members:
                with contextlib.suppress(OSError):
                    member.link.send(packed)
            self._await_ends(CLOSE_TIMEOUT)
        finally:
            self.end()

    def _interrupt(self) -> None:
        """End ranks that run, and leave the rest to the thread that waits for them."""
        self._interrupted = True
        for signum, timeout in ((signal.SIGTERM, TERMINATE_TIMEOUT), (signal.SIGKILL, KILL_TIMEOUT)):
            for member in self.members:
                member.signal(signum)
            # It may be this very thread, where a signal's handler closes the crew.
            if self._runner != threading.get_ident() and self._let_run.wait(timeout):
                break

    def end(self, signum: int = signal.SIGTERM, timeout: float = TERMINATE_TIMEOUT) -> None:
        """End all ranks and what is in their process groups, and let go of everything; idempotent.

        Args:
            signum: what they are told first, before SIGKILL...
            timeout: ... and for how many seconds.
        """
        if self.closed:
            return
        self.closed = True
        with contextlib.ExitStack() as steps:  # each is taken also when one before it raises
            steps.callback(self._let_go)
            steps.callback(self._await_ends, KILL_TIMEOUT)
            for member in self.members:
                steps.callback(member.signal, signal.SIGKILL)
            if not all(member.is_gone() for member in self.members):
                for member in self.members:
                    member.signal(signum)
                    member.link.close()  # one that waits for its end, having failed, need not be killed
                self._await_ends(timeout)

    def _await_ends(self, timeout: float) -> None:
        """Wait until all ranks have ended, reading what they still write."""
        deadline = time.monotonic() + timeout
        while True:
            running = [member.pidfd for member in self.members if member.pidfd is not None and not member.is_gone()]
            left = deadline - time.monotonic()
            if not running or left <= 0:
                break
            outputs = self.output.descriptors()
            shown = self.output.deadline()
            if shown is not None:
                left = min(left, max(0.0, shown - time.monotonic()))
            for fd in _wait_for([*running, *outputs], left) & set(outputs):
                self.output.read(fd)
            self.output.tick()

    def _let_go(self) -> None:
        with contextlib.ExitStack() as steps:
            if self._port is not None:
                steps.callback(self._port.close)
            if hasattr(self, "ledger"):
                steps.callback(self.ledger.close)
            if hasattr(self, "output"):
                steps.callback(self.output.close)
                steps.callback(self.output.drain)
            for member in self.members:
                steps.callback(member.report.close)
                steps.callback(member.link.close)
                steps.callback(member.let_go)

    # Looking on -------------------------------------------------------------------------------------------------------

    def ticks(self) -> tuple[int, ...]:
        """Changes with any progress."""
        return (self.output.activity, *(self.ledger.entry(index).ticks for index in range(self.count)))

    def explain(self) -> str:
        """Where every rank is, and who waits for whom."""
        return hang.explain([hang.Member(m.rank, m.pid, self._ended(m)) for m in self.members], self.ledger)

    @staticmethod
    def _ended(member: Member) -> str:
        """How a rank has ended; "" for one that runs."""
        if not member.is_gone():
            return ""
        member.process.join(KILL_TIMEOUT)
        name = failures.signal_name(member.process.exitcode)
        return f"killed by {name}" if name else f"exit code {member.process.exitcode}"


class _Watch:
    """Looks for progress, where the user has set a timeout."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self.timeout = team.options.timeout
        self.ticks: tuple[int, ...] = ()
        self.since = time.monotonic()

    def left(self) -> float | None:
        """Seconds until the next look."""
        return None if self.timeout is None else min(LOOK_EVERY, self.timeout)

    def look(self) -> None:
        """Take note of progress.

        Raises:
            RanksStuck: there was none for too long.
        """
        if self.timeout is None:
            return
        ticks, now = self.team.ticks(), time.monotonic()
        if ticks != self.ticks:
            self.ticks, self.since = ticks, now
        elif now - self.since > self.timeout:
            raise RanksStuck(f"no rank made any progress for {self.timeout:g} s: {self.team.explain()}")


@contextlib.contextmanager
def _explaining(team: Team) -> Iterator[None]:
    """While ranks run, SIGQUIT (Ctrl-backslash) prints where each of them is, unless the program has a use for it."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGQUIT) is not signal.SIG_DFL
    ):
        yield
        return

    # The handler may run in the middle of anything: it only wakes the loop.
    team.asked = asked = os.eventfd(0)
    signal.signal(signal.SIGQUIT, lambda *_: os.eventfd_write(asked, 1))
    try:
        yield
    finally:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        team.asked = -1
        os.close(asked)


def _wait_for(fds: list[int], timeout: float) -> set[int]:
    """Those that are readable after at most so many seconds."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return {fd for fd, _ in poller.poll(timeout * 1000)}


def _reserve_port() -> socket.socket:
    """A port of this machine that nobody else is given: bound, but without listening.

    torch's stores set the same option, so a rank that makes one can listen there.
    """
    port = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", 0))
    except BaseException:
        port.close()
        raise
    return port


def _elastic_variables(options: Options, host: Host | None, restart: int) -> dict[str, str]:
    """What programs read that count their restarts."""
    return {
        "TORCHELASTIC_RESTART_COUNT": str(restart if host is None else host.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(options.restarts if host is None else host.max_restarts),
        "TORCHELASTIC_RUN_ID": "torchcrew" if host is None else host.run_id,
        "GROUP_RANK": str(0 if host is None else host.node_rank),
        "GROUP_WORLD_SIZE": str(1 if host is None else host.nodes),
        "TORCHELASTIC_USE_AGENT_STORE": str(host is not None),  # `nodes` serves the store
    }
