"""A rank, as the user's process sees it: how it is started, watched, signalled and reaped.

    RankProcess.start(plan)   Start ─► process ─► guardian.watch ─► "guarded"
      is_gone, signal         by its pidfd; signals go to its whole process group
      let_go                  reap, forget

Owner      of the process object, our end of the link and the report: this object. The pidfd is the guardian's.
Death      of the rank: its pidfd. Of this process in the middle of a start: a rank runs nothing before it is guarded.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterable
from typing import Any

from torchcrew.crew import guardian, zygote
from torchcrew.crew.guardian_main import is_dead, signal_group
from torchcrew.crew.reports import Report
from torchcrew.launcher import failures
from torchcrew.launcher.group import Plan
from torchcrew.launcher.ledger import Ledger
from torchcrew.launcher.link import Guarded, Link
from torchcrew.launcher.member import Start, be_rank
from torchcrew.launcher.output import Output

__all__ = ("KILL_TIMEOUT", "RankProcess")

#: How long SIGKILL may take, in seconds; a process in uninterruptible sleep is left behind then.
KILL_TIMEOUT = 5.0


class RankProcess:
    """One rank."""

    def __init__(self, rank: int) -> None:
        """Not yet started."""
        self.rank = rank
        self.link, self._theirs = Link.pair()
        self.report = Report()
        self.pid = 0
        self.process: Any = None
        #: None for one that is not yet watched, or was gone before it could be.
        self.pidfd: int | None = None

    def start(
        self,
        plan: Plan,
        method: str,
        environ: dict[str, str],
        ledger: Ledger,
        output: Output,
        others: Iterable[RankProcess],
    ) -> None:
        """Start it.

        Raises:
            Exception: whatever starting a process raises; `end_start` ends what there is of it.
        """
        context: Any = zygote.get_context() if method == "zygote" else multiprocessing.get_context(method)
        inherited = [self.link, *(other.link for other in others)]
        streams = output.streams(plan.local_rank)
        default = multiprocessing.get_start_method(allow_none=True)
        name = None if default is None else str.__str__(default)  # a name of our own travels under another one
        start = Start(self.report, streams, self._theirs, ledger, plan, environ, method, name, inherited)
        self.process = context.Process(target=be_rank, args=(start,), name=f"rank {plan.rank}")
        self.process.environ = environ
        self.process.start()
        self.pid = self.process.pid
        self.pidfd = guardian.watch(self.pid)
        self._theirs.close()
        if method != "zygote":  # whose processes wait for their guard before anything of them runs
            with contextlib.suppress(OSError):  # it is gone, which its pidfd says
                self.link.send(Link.pack(Guarded()))
        output.started(plan.local_rank)

    def is_gone(self) -> bool:
        """Whether it has ended, or never ran."""
        return self.pidfd is None or is_dead(self.pidfd)

    def signal(self, signum: int) -> None:
        """Signal it, and all that is in its process group."""
        if self.pidfd is not None:
            signal_group(self.pid, self.pidfd, signum)

    def exitcode(self) -> int | None:
        """Of one that is gone; None where it cannot be known, and while it runs."""
        if not self.is_gone() or not self.pid:
            return None
        self.process.join(KILL_TIMEOUT)
        code: int | None = self.process.exitcode
        return code

    def how_it_ended(self) -> str:
        """In words; "" while it runs."""
        if not self.is_gone():
            return ""
        code = self.exitcode()
        name = failures.signal_name(code)
        return f"killed by {name}" if name else f"exit code {code}"

    def let_go(self) -> None:
        """Reap it, and close what there is for it: an error's traceback may keep this object for long. Idempotent."""
        self.link.close()
        self._theirs.close()
        self.report.close()
        if self.process is None or self.process.pid is None:
            return
        if self.pidfd is None:  # its start was interrupted, or it is gone
            self.process.kill()
        self.process.join(KILL_TIMEOUT)
        self.pidfd = None
        guardian.forget(self.process.pid)
        with contextlib.suppress(ValueError):  # it could not be killed
            self.process.close()
