"""`launch`: a program of several ranks by one call."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torchcrew.launcher.crew import Crew
from torchcrew.launcher.options import Options

if TYPE_CHECKING:
    from torchcrew.launcher.options import StartMethod

__all__ = ("launch",)

T = TypeVar("T")
log = logging.getLogger("torchcrew")


def launch(
    fn: Callable[..., T],
    *args: Any,
    nprocs: int | Literal["auto"] = "auto",
    backend: str | None = "auto",
    threads_per_rank: int | Literal["auto"] = "auto",
    timeout: float | None = None,
    start_method: StartMethod = "zygote",
    restarts: int = 0,
    logs: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[T]:
    """Call ``fn(*args, **kwargs)`` in ``nprocs`` new processes, the ranks of one job, and return its values by rank.

    In each of them a process group is ready: `torch.distributed` works at once, and so does code that calls
    `init_process_group` itself, as under `torchrun`. `torchcrew.rank()`, `local_rank()`, `world_size()` and `device()`
    say who and where a rank is; ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` are set.
    Nothing listens; where gloo is asked for, its own sockets, on the loopback interface.

    When a rank raises, or ends by whatever cause, all ranks are ended, at once whatever they do, and the first failure
    is raised here; see `Crew.run`. If this process dies, so do they, and what they have started.

    In a process that is a rank of a job already (of `torchrun`, ``srun`` with several tasks, ``mpirun``, `launch`) no
    process is started: this one takes part, with its ``fn``, and every rank gets all values.

    Args:
        fn: any function that this process can call: also a lambda, a closure, or one of a notebook's cell.
        args: what it gets; see `Crew.run`.
        nprocs: how many, or "auto": one for each GPU; without GPUs one for each core that this process may use.
        backend: of the process group; "auto": "nccl" where each rank has a GPU of its own, else "crew", which
            exchanges tensors through shared memory. None: none is made.
        threads_per_rank: threads in which each rank computes, or "auto": the usable cores shared out.
        timeout: seconds without any progress of any rank after which `RanksStuck` says where each of them is; see
            `Crew`.
        start_method: "zygote" (milliseconds, and any function), or "spawn", "forkserver", "fork", as `multiprocessing`.
        restarts: how often all ranks are started anew after a failure; what `fn` should remember it must have saved.
        logs: None: what ranks print appears here in whole lines; "prefix": with the rank before each; a folder: in one
            file for each rank.
        env: variables for the ranks' environment in addition.
        kwargs: what ``fn`` gets.

    Returns:
        The values of ``fn`` in the order of the ranks. Tensors in them are copies.

    Raises:
        Exception: the first failure of a rank, with a `RankFailed` as its cause; or ``fn`` or an argument cannot be
            pickled.
        RankDied: a rank ended without an exception.
        RanksStuck: see ``timeout``.
        TypeError, ValueError: for an option that cannot be meant.

    Example:
        ```python
        def train(epochs):
            model = DistributedDataParallel(Model().to(torchcrew.device()))
            ...

        losses = torchcrew.launch(train, 10, nprocs=4)
        ```
    """
    options = Options(nprocs, backend, threads_per_rank, timeout, start_method, restarts, logs, env)
    from torchcrew.launcher import joining

    outer = joining.outer()
    if outer is not None:
        return joining.run_joined(outer, fn, args, kwargs, backend)
    for restart in range(restarts + 1):
        try:
            with Crew.of(options, restart=restart) as crew:
                return crew.run(fn, *args, **kwargs)
        except Exception as error:
            if restart == restarts or not _is_a_ranks(error):
                raise
            _say_restart(error, restart + 1, restarts)
    raise AssertionError("unreachable")


def _is_a_ranks(error: Exception) -> bool:
    """Whether an error came from a rank, and not from a call that could not begin."""
    from torchcrew.errors import RankFailed, RanksStuck

    return isinstance(error, (RankFailed, RanksStuck)) or isinstance(error.__cause__, RankFailed)


def _say_restart(error: Exception, number: int, restarts: int) -> None:
    from torchcrew.errors import RankFailed
    from torchcrew.launcher.failures import describe

    failed = error if isinstance(error, RankFailed) else error.__cause__
    where = f"rank {failed.rank}: " if isinstance(failed, RankFailed) and failed is not error else ""
    log.warning("%s%s; all ranks are started anew (%d of %d restarts)", where, describe(error), number, restarts)
