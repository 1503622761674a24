"""`spawn` and `start_processes`: the ranks of one function, of which the first failure ends all.

    caller                                                  rank i
    start_processes ── Process(target=_be_rank, …) ───────► rendezvous; fn(i, *args)
      ProcessContext                                          │ an exception: its traceback to the report, exit code 1
        sentinels  ◄──────────────────────────────────────────┘
        join(): the first end that is a failure → which rank failed first → SIGTERM, SIGKILL to the others → raise

Owner      the caller owns processes and reports (a memfd each); the meeting place belongs to the ranks alone.
Death      rank: seen by its sentinel, whatever it was doing; the others are ended when somebody joins.
           caller: the guardian kills every rank, also one in native code; the ranks' own guardians kill their children.
           Ctrl-C: the terminal tells caller and ranks; the caller waits for them, and ends those that do not listen.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

from torch.multiprocessing.spawn import (
    ENV_VAR_PARALLEL_START,
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
)
from torch.multiprocessing.spawn import ProcessContext as StockContext

from torchcrew.crew import rank as ranks
from torchcrew.crew import reports, stacks, zygote
from torchcrew.crew.foresight import expected_imports
from torchcrew.crew.functions import Portable
from torchcrew.crew.rendezvous import Rendezvous
from torchcrew.crew.reports import Failure, Kind, Report
from torchcrew.multiprocessing import children
from torchcrew.multiprocessing.context import default_context

__all__ = (
    "ENV_VAR_PARALLEL_START",
    "ProcessContext",
    "ProcessException",
    "ProcessExitedException",
    "ProcessRaisedException",
    "SpawnContext",
    "spawn",
    "start_processes",
)

#: By stock's name, so that who filters or reads these lines goes on doing so.
log = logging.getLogger("torch.multiprocessing.spawn")

#: How long SIGTERM may take to end the ranks before SIGKILL, in seconds, where no grace period is given; stock's.
TERMINATE_TIMEOUT = 30.0
#: How long SIGKILL may take, in seconds; a process in uninterruptible sleep is left behind then.
KILL_TIMEOUT = 10.0
#: How long to wait for the rank that was the cause, in seconds, where the first end seen is a mere consequence of it:
#: a rank that takes down its process group in a `finally` is noticed by its peers before it has raised itself.
CAUSE_TIMEOUT = 0.5


@dataclass
class _Start:
    """What a rank has to know before its function runs."""

    report: Report  # unpickled first: it reports what goes wrong with the rest
    rendezvous: Rendezvous
    rank: ranks.Rank


def _be_rank(start: _Start, fn: Any, args: Sequence[Any]) -> None:
    """Be one rank."""
    reports.loaded()
    ranks.become(start.rank)
    stacks.offer(f"rank {start.rank.index}")
    start.rendezvous.attend(start.rank)
    if isinstance(fn, Portable):  # forked, not pickled
        fn = fn.value
    try:
        fn(start.rank.index, *args)
    except KeyboardInterrupt:
        pass  # the terminal's Ctrl-C
    except Exception as error:
        start.report.write(error)
        sys.exit(1)


class ProcessContext(StockContext):
    """The processes that `start_processes` started, to be joined together; an instance of stock's class of this name.

    A context that nobody refers to any more leaves its processes running, as stock's does.
    """

    def __init__(self, processes: Sequence[Any], error_files: Sequence[Any]) -> None:
        """Take over running processes.

        Args:
            processes: started process objects, in the order of their ranks.
            error_files: for each what it reports its failure in. Paths are read as stock's files.
        """
        super().__init__(processes, error_files)  # type: ignore[no-untyped-call]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait for one process to fail or for some to end; call it until it returns True.

        When a process has failed, the others are ended: they are given ``grace_period`` to end by themselves, then
        SIGTERM, as long again (30 s if none is given), and SIGKILL. None of them runs when this raises.

        Args:
            timeout: how long to wait, in seconds; forever if None.
            grace_period: see above, in seconds.

        Returns:
            Whether all processes have ended, without a failure.

        Raises:
            ProcessRaisedException: a function raised; the text has its traceback. Where several ranks failed it is
                the one that failed first, as far as can be told.
            ProcessExitedException: a process was ended by a signal, or with an exit code.
        """
        if not self.sentinels:
            return True
        failed = self._failed(connection.wait(list(self.sentinels), timeout))
        if not failed:
            return not self.sentinels
        first = self._first(failed)
        self._end(grace_period)
        self.sentinels = {sentinel: index for sentinel, index in self.sentinels.items() if index != first}
        raise self._error(first)  # kept by no variable: its traceback would keep this frame, and that this context

    def _failed(self, ready: Iterable[Any]) -> list[int]:
        """Take note of the processes that have ended; returns those that failed."""
        failed = []
        for sentinel in ready:
            index = self.sentinels[sentinel]
            self.processes[index].join()
            if self.processes[index].exitcode != 0:
                failed.append(index)
            else:
                del self.sentinels[sentinel]
        return failed

    def _first(self, failed: list[int]) -> int:
        """The rank that failed first, of these and of those that have reported a failure but still run."""
        deadline = time.monotonic() + CAUSE_TIMEOUT
        while True:
            failures: dict[int, Failure | None] = {index: self._report(index) for index in failed}
            for index in self.sentinels.values():
                if index not in failures and (failure := self._report(index)) is not None:
                    failures[index] = failure
            killed = {index for index in failed if self.processes[index].exitcode < 0}
            first = reports.first(failures, killed)
            failure = failures[first]
            others = [sentinel for sentinel, index in self.sentinels.items() if index not in failed]
            if failure is None or failure.kind is not Kind.CONSEQUENCE or not others:
                return first
            ready = connection.wait(others, max(0.0, deadline - time.monotonic()))
            if not ready:
                return first
            failed += self._failed(ready)

    def _report(self, index: int) -> Failure | None:
        """What a rank has reported."""
        report = self.error_files[index]
        if isinstance(report, Report):
            return report.read()
        return reports.of_file(report)

    def _end(self, grace_period: float | None) -> None:
        """End and reap all processes."""
        if grace_period is not None:
            self._join_all(grace_period)
        for process in self.processes:
            if process.is_alive():
                log.warning("Terminating process %s via signal SIGTERM", process.pid)
                process.terminate()
        self._join_all(TERMINATE_TIMEOUT if grace_period is None else grace_period)
        for process in self.processes:
            if process.is_alive():
                log.warning(
                    "Unable to shutdown process %s via SIGTERM , forcefully exiting via SIGKILL",
                    process.pid,
                )
                process.kill()
        self._join_all(KILL_TIMEOUT)
        for process in self.processes:
            children.seen(process)  # the error that is raised speaks for all of them

    def _join_all(self, timeout: float) -> None:
        """Reap what ends in time."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))

    def _error(self, index: int) -> Exception:
        """The exception for the failure of a rank."""
        process = self.processes[index]
        failure = self._report(index)
        if failure is not None and failure.kind is not Kind.LOADING:
            head = f"\n\n-- Process {index:d} terminated with the following error:\n"
            return ProcessRaisedException(head + failure.text, index, process.pid)
        code: int = process.exitcode
        name, how = None, f"exit code {code:d}"
        if code < 0:
            name = _signal_name(-code)
            how = f"signal {name}"
        text = f"process {index:d} terminated with {how}"
        if failure is not None:
            text += f"\n\n-- Process {index:d} could not load its function and arguments:\n{failure.text}"
        return ProcessExitedException(text, index, process.pid, code, name)


class SpawnContext(ProcessContext):
    """The former name of `ProcessContext`."""

    def __init__(self, processes: Sequence[Any], error_files: Sequence[Any]) -> None:
        """Warn, as stock does."""
        warnings.warn("SpawnContext is renamed to ProcessContext since 1.4 release.", stacklevel=2)
        super().__init__(processes, error_files)


def start_processes(
    fn: Callable[..., object],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """Start ``nprocs`` processes that run ``fn(i, *args)`` for i from 0 on, and wait for them.

    In each of them `torch.distributed.init_process_group` works without an address, as long as none is given by the
    environment or the call: the ranks meet without a port. If one fails, the others are ended. If the caller dies, all
    are killed.

    Args:
        fn: any function that this process can call. One that the new processes can import goes by reference; a lambda,
            a closure, and what was defined at a prompt, in a notebook or by ``python -c`` goes by value.
        args: what it gets after its number.
        nprocs: how many.
        join: whether to wait.
        daemon: whether they are daemonic processes, which may have no children.
        start_method: "spawn", "fork", "forkserver" or "zygote". The environment variable ``TORCH_MP_PARALLEL_START=1``
            has "forkserver" start them from several threads.

    Returns:
        None if ``join``, else a `ProcessContext`.

    Raises:
        ProcessRaisedException, ProcessExitedException: see `ProcessContext.join`.
        Exception: whatever starting one raises (something cannot be pickled); those that run already are ended.
    """
    zygote.preload(*expected_imports([fn, *args]))
    parallel = start_method == "forkserver" and os.environ.get(ENV_VAR_PARALLEL_START, "0") == "1"
    if parallel:
        log.info("Starting processes in parallel.")
    starter = _Starter(default_context.get_context(start_method), fn, args, nprocs, daemon)
    try:
        context = starter.start_all(parallel)
    finally:
        starter.rendezvous.close()
    if not join:
        return context
    try:
        while not context.join():
            pass
    except (ProcessRaisedException, ProcessExitedException):
        raise
    except BaseException:  # Ctrl-C, mostly; nobody else has the context
        _end_interrupted(context)
        raise
    return None


def spawn(
    fn: Callable[..., object],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """Start ``nprocs`` processes by the start method "spawn"; `start_processes` says the rest.

    Args:
        fn: any function that this process can call; it gets its number and ``args``.
        args: what it gets after its number.
        nprocs: how many.
        join: whether to wait.
        daemon: whether they are daemonic processes.
        start_method: only for the warning that it is not heeded.

    Returns:
        None if ``join``, else a `ProcessContext`.

    Raises:
        ProcessRaisedException, ProcessExitedException: see `ProcessContext.join`.
    """
    if start_method != "spawn":
        message = (
            f"This method only supports start_method=spawn (got: {start_method}).\n"
            "To use a different start_method use:\n\t\t"
            " torch.multiprocessing.start_processes(...)"
        )
        warnings.warn(message, FutureWarning, stacklevel=2)
    return start_processes(fn, args, nprocs, join, daemon, start_method="spawn")


class _Starter:
    """Starts the processes of one call."""

    def __init__(self, context: Any, fn: Any, args: Sequence[Any], nprocs: int, daemon: bool) -> None:
        self.context = context
        self.fn = Portable(fn)
        self.args = args
        self.nprocs = nprocs
        self.daemon = daemon
        self.rendezvous = Rendezvous()

    def start_all(self, parallel: bool) -> ProcessContext:
        """Start all, or none."""
        started: dict[int, tuple[Any, Report]] = {}
        try:
            if parallel and self.nprocs > 1:
                with ThreadPoolExecutor(max_workers=self.nprocs) as executor:
                    jobs = [executor.submit(self.start, index, started) for index in range(self.nprocs)]
                for job in jobs:
                    job.result()
            else:
                for index in range(self.nprocs):
                    self.start(index, started)
        except BaseException:
            for process, _ in started.values():
                process.kill()
            for process, _ in started.values():
                process.join(KILL_TIMEOUT)
            raise
        pairs = [started[index] for index in range(self.nprocs)]
        return ProcessContext([process for process, _ in pairs], [report for _, report in pairs])

    def start(self, index: int, started: dict[int, tuple[Any, Report]]) -> None:
        """Start one."""
        report = Report()
        start = _Start(report, self.rendezvous, ranks.Rank(index, self.nprocs))
        process = self.context.Process(target=_be_rank, args=(start, self.fn, self.args), daemon=self.daemon)
        process.start()
        started[index] = process, report


def _end_interrupted(context: ProcessContext) -> None:
    """End the ranks of a call that was interrupted, after a time for doing so themselves that a second Ctrl-C cuts."""
    try:
        context._join_all(TERMINATE_TIMEOUT)
        for process in context.processes:
            process.terminate()
        context._join_all(KILL_TIMEOUT)
    finally:
        for process in context.processes:
            process.kill()
        context._join_all(KILL_TIMEOUT)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"<Unknown signal {number}>"
