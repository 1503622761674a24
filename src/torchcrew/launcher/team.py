"""Ranks that run, and the loop of the user's process that waits for them.

    Team(options, ...)   starts the ranks
      run(message)       one thread, one poll: links, pidfds, output, the clock
                           every rank returned ─► values         one failed or died ─► first cause ─► end all ─► raise
      close()            ask ─► SIGTERM ─► SIGKILL

Owner      of the ranks (`rank_process`), the ledger, the output pipes, and the socket that keeps MASTER_PORT for them.
Closing    `close` or `end`, both idempotent; no rank runs after them, nor what is in its process group.
Death      of a rank: its pidfd, whatever it was doing. Of this process: the guardian kills the ranks' groups.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Container

from torchcrew.crew.reports import first
from torchcrew.errors import RanksStuck
from torchcrew.launcher import failures, hang
from torchcrew.launcher.failures import End
from torchcrew.launcher.ledger import Entry, Ledger, Phase
from torchcrew.launcher.link import Close, Failed, Link, Returned, Run
from torchcrew.launcher.options import Host, Options
from torchcrew.launcher.output import Output
from torchcrew.launcher.rank_process import KILL_TIMEOUT, RankProcess
from torchcrew.launcher.starting import Starting
from torchcrew.launcher.watch import ABSENCE_EVERY, Absence, Progress, asked

__all__ = ("Team",)

#: How long to wait for the rank that was the cause, in seconds, where a failure seen is a mere consequence of it.
CAUSE_TIMEOUT = 0.5
#: After a failure: how long SIGTERM may take, in seconds. Ranks that wait in native code end at once or never.
TERMINATE_TIMEOUT = 0.25
#: After Ctrl-C: how long ranks get for their `finally` and `except`, in seconds.
INTERRUPT_TIMEOUT = 1.0
#: How long ranks may take to end when they are asked to, in seconds: their exit handlers, and threads of the user's.
CLOSE_TIMEOUT = 5.0


class Team:
    """Started ranks."""

    def __init__(self, options: Options, host: Host | None = None, restart: int = 0, *, once: bool = False) -> None:
        """Start them; returns before they are ready.

        Args:
            options: how.
            host: the place of this machine, if others take part.
            restart: how often they were started before.
            once: there will be one run.

        Raises:
            Exception: whatever starting one raises; none runs then.
        """
        self.options = options
        self.count = options.ranks()
        self.members: list[RankProcess] = []
        self.closed = False
        self._runner: int | None = None  # the thread that is in `run`
        self._let_run = threading.Event()  # it is not
        self._interrupted = False
        self._number = 0  # of the run
        self._once = once
        self._dismissed: set[int] = set()  # that have returned, and were told to end
        self._asked = -1  # an eventfd: somebody wants to know where the ranks are
        with contextlib.ExitStack() as undo:
            undo.callback(self.end)
            self.output = Output(self.count, options.logs, 0 if host is None else host.first, restart > 0)
            self.ledger = Ledger.create(self.count)
            self.starting = Starting(options, self.count, host, restart)
            self._start_all()
            undo.pop_all()

    def _start_all(self) -> None:
        environ = self.output.environment() | self.options.environment(self.count)
        try:
            for index in range(self.count):
                plan = self.starting.plan(index)
                member = RankProcess(plan.rank)
                others = tuple(self.members)
                self.members.append(member)  # before its start, which an interrupt may leave half done
                member.start(plan, self.options.start_method, environ, self.ledger, self.output, others)
        finally:
            self.starting.done()

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
        if self.closed:
            raise RuntimeError("this crew was closed")
        packed = Link.pack(message)
        self._number = message.number
        self._runner = threading.get_ident()
        self._let_run.clear()
        try:
            for member in self.members:
                # It is gone, which its pidfd says. Other errors, as of too many descriptors in flight, would leave a
                # rank without a message, which nobody would ever hear of.
                with contextlib.suppress(ConnectionError):
                    member.link.send(packed)
            del packed
            with asked() as self._asked:
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
            self._asked = -1
            self._runner = None
            self._let_run.set()

    def _collect(self) -> list[Returned]:
        returned: dict[int, Returned] = {}
        progress = Progress(self.options.timeout, self._ticks, self._is_starting, self.explain)
        absence = Absence(self.ledger, self.count)
        while len(returned) < self.count:
            naps = [nap for nap in (progress.left(), ABSENCE_EVERY if returned else None) if nap is not None]
            failed = self._look(returned, min(naps, default=None), known=self._dismissed)
            if failed:
                raise self._failure(failed)
            progress.look()
            self._mind(absence, returned)
        self.output.drain()
        return [returned[index] for index in range(self.count)]

    def _mind(self, absence: Absence, returned: dict[int, Returned]) -> None:
        """See to it that nobody waits for ever for a rank that has returned.

        Raises:
            RanksStuck: somebody does.
        """
        vain, silent = absence.look({index: one.alone for index, one in returned.items()})
        if vain:
            gone = sorted({self.members[index].rank for _, index in vain})
            raise RanksStuck(f"others wait in vain for {_ranks(gone)}, which returned: {self.explain()}")
        if silent and self._once and not self._dismissed:
            self._dismissed = set(returned)
            for index in self._dismissed:
                with contextlib.suppress(OSError):
                    self.members[index].link.send(Link.pack(Close()))

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
            else:
                timeout = 0.0
        if self._asked >= 0:
            poller.register(self._asked, select.POLLIN)
        deadline = self.output.deadline()
        if deadline is not None:
            timeout = min(max(0.0, deadline - time.monotonic()), 3600.0 if timeout is None else timeout)
        ready = {fd for fd, _ in poller.poll(None if timeout is None else timeout * 1000)}
        for fd in ready & outputs:
            self.output.read(fd)
        self.output.tick()
        if self._asked in ready:
            os.eventfd_read(self._asked)
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
                # One of a former run comes where that was interrupted, and its end as well.
                if isinstance(message, Returned) and message.number == self._number:
                    returned[index] = message
        except EOFError:
            # It is about to end, or has closed a descriptor that is not its own.
            gone = True
            if member.pidfd is not None:
                _wait_for([member.pidfd], KILL_TIMEOUT)
        except Exception as error:
            if hasattr(error, "add_note"):
                error.add_note(
                    f"What rank {member.rank} has returned cannot be unpickled in this process. Of a model that is "
                    "wrapped for its ranks return model.module.state_dict()."
                )
            raise
        return gone

    # Failing ----------------------------------------------------------------------------------------------------------

    def _failure(self, failed: set[int]) -> Exception:
        """The error for the first failure; all ranks have ended then."""
        deadline = time.monotonic() + CAUSE_TIMEOUT
        while True:
            failed |= {i for i, m in enumerate(self.members) if m.is_gone() or m.report.read() is not None}
            failed -= self._dismissed
            ends = {index: self._end_of(index) for index in sorted(failed)}
            cause = first(
                {index: end.failure for index, end in ends.items()},
                {index for index, end in ends.items() if failures.signal_name(end.exitcode)},
            )
            left = deadline - time.monotonic()
            everybody = len(failed) + len(self._dismissed) == self.count
            if not failures.is_consequence(ends[cause]) or everybody or left <= 0:
                break
            failed |= self._look({}, left, known=failed | self._dismissed)
        self.output.drain(wait=False)  # the last words of a rank belong to its error
        end = self._end_of(cause)
        self.end()
        return failures.error(end)

    def _end_of(self, index: int) -> End:
        member = self.members[index]
        remark = ""
        if self._dismissed:
            gone = _ranks([self.members[number].rank for number in sorted(self._dismissed)])
            remark = f"Before, {gone} had returned, and the others had done nothing for some time."
        elif member.is_gone() and not dict(self.ledger.members()).get(index):
            remark = "It had not begun: importing the script failed, and what it wrote is above."
        report, tail = member.report.read(), self.output.tail(index)
        return End(member.rank, member.pid, member.exitcode(), report, tail, remark)

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
        with contextlib.ExitStack() as steps:  # each is taken also when one before it raises
            steps.callback(self._let_go)
            steps.callback(self._await_ends, KILL_TIMEOUT)
            for member in self.members:
                steps.callback(member.signal, signal.SIGKILL)
            self.closed = True
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
            if hasattr(self, "starting") and self.starting.port is not None:
                steps.callback(self.starting.port.close)
            if hasattr(self, "ledger"):
                steps.callback(self.ledger.close)
            if hasattr(self, "output"):
                steps.callback(self.output.close)
                steps.callback(self.output.drain)
            for member in self.members:
                steps.callback(member.let_go)

    # Looking on -------------------------------------------------------------------------------------------------------

    def stats(self) -> tuple[Entry, ...]:
        """What each rank does."""
        return tuple(self.ledger.entry(index) for index in range(self.count))

    def _ticks(self) -> tuple[int, ...]:
        """Changes with any progress."""
        return (self.output.activity, *(entry.ticks for entry in self.stats()))

    def _is_starting(self) -> bool:
        """Whether some rank is not yet ready for its function."""
        return any(entry.phase is Phase.STARTING for entry in self.stats())

    def explain(self) -> str:
        """Where every rank is, and who waits for whom."""
        return hang.explain([hang.Member(m.rank, m.pid, m.how_it_ended()) for m in self.members], self.ledger)


def _ranks(numbers: list[int]) -> str:
    """In words."""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _wait_for(fds: list[int], timeout: float) -> set[int]:
    """Those that are readable after at most so many seconds."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return {fd for fd, _ in poller.poll(timeout * 1000)}
