"""Ranks for the tests of the process group: warm ones that return values, and others that a test may kill.

run(fn, 2)          torchcrew.launch ─► fn(rank, size) in each, with a group ready ─► values by rank
Ranks(fn, 3)        processes of ours ─► each makes a group and runs fn ─► value or error, through a pipe each
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

import torchcrew
from torchcrew.collectives import register
from torchcrew.crew import zygote

__all__ = ("Failed", "Ranks", "all_gather_single", "hear", "reduce_scatter_single", "results_of", "run", "tell")

#: torch 2.13 has given them new names, and warns of the old ones.
all_gather_single: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def run(
    fn: Callable[..., Any], nprocs: int, *args: Any, backend: str | None = "crew", timeout: float | None = 60.0
) -> list[Any]:
    """What ``fn(rank, size, *args)`` returns in each of ``nprocs`` ranks, in their order.

    Args:
        fn: can be imported, or pickled by value.
        backend: of the group that is ready; None: ``fn`` makes its own.
        timeout: seconds without progress of any rank, after which `RanksStuck` says where they are.
    """
    return torchcrew.launch(_call, fn, args, backend, nprocs=nprocs, backend=None, threads_per_rank=1, timeout=timeout)


def _call(fn: Callable[..., Any], args: tuple[Any, ...], backend: str | None) -> Any:
    torch.set_num_threads(1)
    register()
    if backend is not None:
        dist.init_process_group(backend)
    value = fn(torchcrew.rank(), torchcrew.world_size(), *args)
    if backend is not None and dist.is_initialized():
        dist.destroy_process_group()
    return value


class Failed:
    """How a function has failed in a rank of `Ranks`."""

    def __init__(self, error: BaseException) -> None:
        self.kind = type(error).__name__
        self.text = str(error)
        self.traceback = "".join(traceback.format_exception(error))
        self.at = time.monotonic()
        """When, on the clock that all processes share."""

    def __repr__(self) -> str:
        return f"Failed({self.kind}: {self.text})"


class Ranks:
    """Ranks that may be killed without all of them being ended, as `launch` would.

    Args:
        fn: called with rank, size and ``args``, in a group that is ready.
        nprocs: how many.
        timeout: of the group, in seconds.
    """

    def __init__(self, fn: Callable[..., Any], nprocs: int, *args: Any, timeout: float = 15.0) -> None:
        context: Any = zygote.get_context()
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Any] = []
        self.processes: list[Any] = []
        for rank in range(nprocs):
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            place = os.path.join(self._folder.name, "store")
            process = context.Process(target=_be, args=(theirs, fn, rank, nprocs, place, timeout, args))
            process.start()
            self.processes.append(process)
            theirs.close()
        self.pids = [process.pid for process in self.processes]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def signal(self, rank: int, signum: int = signal.SIGKILL) -> float:
        """Send a signal; when that was, on the clock that all processes share."""
        os.kill(self.pids[rank], signum)
        return time.monotonic()

    def say(self, rank: int, message: Any = None) -> None:
        """Send something to a rank, which gets it by ``hear()``."""
        self._pipes[rank].send(message)

    def results(self, *ranks: int, within: float = 10.0) -> list[Any]:
        """What these ranks have returned, or a `Failed`; all, if none are named.

        Raises:
            TimeoutError: one of them has neither returned nor failed in time.
        """
        wanted = ranks or tuple(range(len(self.processes)))
        deadline = time.monotonic() + within
        found = []
        for rank in wanted:
            left = max(deadline - time.monotonic(), 0.0)
            if not wait([self._pipes[rank]], left):
                raise TimeoutError(f"rank {rank} has not answered in {within} s")
            found.append(self._pipes[rank].recv())
        return found


_own: list[Any] = []


def hear(within: float = 10.0) -> Any:
    """In a rank of `Ranks`: what `Ranks.say` has sent."""
    if not _own[0].poll(within):
        raise TimeoutError("nobody has said anything")
    return _own[0].recv()


def tell(value: Any) -> None:
    """In a rank of `Ranks`: send something before the function has returned; `Ranks.results` gets it."""
    _own[0].send(value)


def _be(
    pipe: Any, fn: Callable[..., Any], rank: int, size: int, place: str, timeout: float, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    _own.append(pipe)
    try:
        register()
        store = dist.FileStore(place, size)
        dist.init_process_group("crew", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
        value = fn(rank, size, *args)
    except BaseException as error:
        value = Failed(error)
    with contextlib.suppress(OSError):
        pipe.send(value)
    # The others shall see the end of the process, not what the interpreter does before it, unless a test says so.
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()


def results_of(
    fn: Callable[..., Any], nprocs: int, *args: Any, timeout: float = 15.0, within: float = 15.0
) -> list[Any]:
    """What ``fn(rank, size, *args)`` returns in each rank of a group; `launch`, which watches ranks, takes no part.

    Raises:
        AssertionError: it has failed in a rank; shows how.
    """
    with Ranks(fn, nprocs, *args, timeout=timeout) as ranks:
        results = ranks.results(within=within)
    failed = [f"rank {rank}:\n{it.traceback}" for rank, it in enumerate(results) if isinstance(it, Failed)]
    assert not failed, "\n".join(failed)
    return results
