"""`Crew`: the same ranks, kept warm for many calls."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Mapping
from multiprocessing import process, util
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torchcrew.launcher.options import Host, Options

if TYPE_CHECKING:
    from torchcrew.launcher.ledger import Entry
    from torchcrew.launcher.options import StartMethod
    from torchcrew.launcher.team import Team

__all__ = ("Crew",)

T = TypeVar("T")


class Crew:
    """Ranks that stay: each `run` calls a function in all of them, and returns its values.

    They start with the first `run`, and keep what they have between two: modules and their globals, the process group,
    and whatever functions leave in ``crew.local``, a namespace of each rank (inside a function, ``crew`` is what was
    given to `run` as an argument, or what a closure refers to). After a failure all of them are gone; the next `run`
    starts new ones, without what the old ones knew.

    If this process dies, so do they, and what they have started. A crew that is forgotten, or left open when the
    program ends, closes itself.

    Args:
        nprocs: how many, or "auto": one for each GPU; without GPUs one for each core that this process may use.
        backend: of the process group that is ready in each rank; "auto": "nccl" where each has a GPU of its own, else
            "crew" (shared memory). None: none is made.
        threads_per_rank: threads in which each computes, or "auto": the usable cores shared out.
        timeout: seconds without any progress of any rank (a collective or a step of `DistributedDataParallel` begins or
            ends, a line is printed, a rank returns) after which `run` raises `RanksStuck`. None: never.
        start_method: "zygote" (milliseconds, and any function), or "spawn", "forkserver", "fork", as `multiprocessing`.
        logs: None: what ranks print appears here in whole lines; "prefix": with the rank before each; a folder: in one
            file for each rank.
        env: variables for the ranks' environment in addition.

    Raises:
        TypeError, ValueError: for an option that cannot be meant.
    """

    def __init__(
        self,
        nprocs: int | Literal["auto"] = "auto",
        *,
        backend: str | None = "auto",
        threads_per_rank: int | Literal["auto"] = "auto",
        timeout: float | None = None,
        start_method: StartMethod = "zygote",
        logs: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._options = Options(
            nprocs=nprocs,
            backend=backend,
            threads_per_rank=threads_per_rank,
            timeout=timeout,
            start_method=start_method,
            logs=logs,
            env=env,
        )
        self._host: Host | None = None
        self._restart = 0
        self._once = False
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._held: list[Team] = []
        self._number = 0
        self._renew = False
        # What it holds is not the crew: a team ends with the last reference to its crew, or with the program, before
        # `multiprocessing` waits for its processes.
        self._finalizer = util.Finalize(self, _close, args=(self._held, self._owner), exitpriority=20)

    @classmethod
    def of(cls, options: Options, host: Host | None = None, restart: int = 0) -> Crew:
        """A crew for one run.

        Args:
            options: how its ranks are started.
            host: the place of this machine in a job of several.
            restart: how often its job was started before.
        """
        crew = cls(options.nprocs)
        crew._options, crew._host, crew._restart, crew._once = options, host, restart, True
        return crew

    def __reduce__(self) -> Any:
        from torchcrew.launcher.member import _rank_side

        return _rank_side, ()

    @property
    def local(self) -> SimpleNamespace:
        """Of each rank; see the class."""
        raise AttributeError("crew.local is a namespace of each rank: use it in a function that crew.run() calls there")

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes, in the order of their ranks; none before the first `run` and after a failure."""
        return tuple(member.pid for team in self._held for member in team.members)

    def run(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        """Call ``fn(*args, **kwargs)`` in every rank, and wait until all have returned.

        When a rank raises, or ends by whatever cause, all ranks are ended, at once whatever they do, and the first
        failure is raised here: the rank's own exception, with a `RankFailed` as its cause that has rank, pid, host,
        its traceback, and the last lines of its standard error; `RankDied` for one that ended without an exception.

        Args:
            fn: any function that this process can call: also a lambda, a closure, or one of a notebook's cell. By
                reference where the ranks can import it.
            args: what it gets. Tensors and arrays arrive as copies, unless they are shared already; queues, locks and
                whatever else may be given to a process may be given here. This crew itself arrives as what has `local`.
            kwargs: the same.

        Returns:
            The values by rank; tensors in them are copies, and valid whatever becomes of the crew.

        Raises:
            Exception: the first failure, see above; or ``fn`` or an argument cannot be pickled, and nothing was run.
            RanksStuck: see ``timeout``.
            RuntimeError: the crew is closed, or another thread is in the middle of a run, or this process is a fork of
                the one that made the crew.
        """
        if not callable(fn):
            raise TypeError(f"fn should be callable, but is {fn!r}")
        if os.getpid() != self._owner:
            raise RuntimeError(f"this crew is one of process {self._owner}, of which this one is a fork: make another")
        if getattr(process.current_process(), "_inheriting", False):
            raise RuntimeError(
                "ranks cannot be started while this process imports the script that starts them: put what the script "
                'does under `if __name__ == "__main__":`, and leave what its ranks import outside of it'
            )
        _check_call(fn, args, kwargs)
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("another run of this crew has not returned yet")
        try:
            return self._run(fn, args, kwargs)
        finally:
            self._lock.release()

    def _run(self, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[T]:
        if not self._finalizer.still_active():
            raise RuntimeError("this crew is closed")
        team = self._team(fn, args, kwargs)
        from torchcrew.launcher.link import Run

        self._number += 1
        try:
            returned = team.run(Run(self._number, self._renew, fn, args, kwargs))
        finally:
            if team.closed:
                self._held.clear()
        self._renew = not all(one.has_group for one in returned)
        return [one.value for one in returned]

    def _team(self, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Team:
        if self._held:
            return self._held[0]
        if self._options.start_method == "zygote":
            from torchcrew.crew import zygote
            from torchcrew.crew.foresight import expected_imports  # imports torch

            zygote.preload(
                "torchcrew.launcher.member",
                "torchcrew.collectives.making",
                *expected_imports([fn, *args, *kwargs.values()]),
            )
            if not process.current_process().daemon:  # those may have no children, which `start` will say
                zygote.warm()  # it imports torch while this process does
        from torchcrew.launcher.team import Team

        self._renew = False
        team = Team(self._options, self._host, self._restart, once=self._once)
        self._held.append(team)
        if not self._finalizer.still_active():  # another thread has closed the crew meanwhile, and closes nothing more
            _close(self._held, self._owner)
            raise RuntimeError("this crew is closed")
        return team

    def stats(self) -> tuple[Entry, ...]:
        """What each rank does, in the order of the ranks, without asking it: phase, collective, numbers of collectives
        and of training steps. None before the first `run`, and after a failure.
        """
        return self._held[0].stats() if self._held else ()

    def explain(self) -> str:
        """Say where every rank is now, and who waits for whom; "" when none runs."""
        return self._held[0].explain() if self._held else ""

    def close(self) -> None:
        """End the ranks: they are asked, after 5 s told by SIGTERM, then killed. Idempotent.

        Those in the middle of a `run` of another thread are ended at once; it raises `RuntimeError` then.
        """
        self._finalizer()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _check_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call that the function cannot take, before anything is started."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # of a function in C
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise TypeError(
            f"{name}{signature} cannot be called so: {error}. It gets what stands behind it, without a rank, which "
            "torchcrew.rank() says; how many ranks there are is nprocs"
        ) from None


def _close(held: list[Team], owner: int) -> None:
    while held:
        team = held.pop()
        if os.getpid() == owner:
            team.close()
