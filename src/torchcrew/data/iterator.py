"""Our iterator: torch's own, with our transport under it."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import torch.multiprocessing

from torchcrew import torch_private
from torchcrew.crew.board import ANYTHING, NOTHING, Board
from torchcrew.data.stats import LoaderRecord, record_of
from torchcrew.data.transport import Transport
from torchcrew.memory.limits import default_budget, parse_bytes

__all__ = ("CrewIterator",)


class _LoaderView:
    """A loader as torch's iterator reads it, with another multiprocessing context."""

    def __init__(self, loader: Any, context: Transport) -> None:
        self._loader = loader
        self.multiprocessing_context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Waiting:
    """Told when the training loop (or torch's pinning thread) begins and ends to wait for a worker."""

    def __init__(self, board: Board, record: LoaderRecord) -> None:
        self._board = board
        self._record = record
        self._began = 0
        self.wanted = NOTHING

    def __call__(self, begins: bool) -> None:
        if begins:
            self._board.want(self.wanted)
            self._began = time.perf_counter_ns()
        else:
            self._board.want(NOTHING)
            self._record.waited(self._began, time.perf_counter_ns())


class CrewIterator(torch_private.StockIterator):
    """Iterates over a loader's batches; see `torchcrew.data.DataLoader`."""

    def __new__(cls, loader: Any, *_: Any, **__: Any) -> CrewIterator:
        # torch's own `__next__` warns about iterable datasets, at its caller's line: nothing may stand in between.
        plain = cls is CrewIterator and loader._dataset_kind != torch_private.ITERABLE
        return super().__new__(_MapIterator if plain else cls)

    def __init__(self, loader: Any) -> None:
        budget = getattr(loader, "memory_budget", None)
        context = loader.multiprocessing_context or torch.multiprocessing
        self._record: LoaderRecord = record_of(loader)
        self._transport = Transport(
            context, loader.num_workers, default_budget() if budget is None else parse_bytes(budget)
        )
        self._waiting = self._transport.receiver.on_wait = _Waiting(self._transport.board, self._record)
        try:
            super().__init__(_LoaderView(loader, self._transport))
            self._transport.watch_started()
        except BaseException:
            # torch sets it when all workers have started, and needs it to end some.
            if not hasattr(self, "_workers_status"):
                self._workers_status = [True] * len(getattr(self, "_workers", ()))
            self._end_workers()
            raise

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._record.begin_epoch(self, self._transport.board)
        self._transport.board.expect(0 if loader.in_order else ANYTHING)
        super()._reset(loader, first_iter)

    def _get_data(self) -> Any:
        self._waiting.wanted = self._rcvd_idx if self._in_order else ANYTHING
        self._transport.board.expect(self._waiting.wanted)
        return super()._get_data()  # type: ignore[no-untyped-call]

    def _shutdown_workers(self) -> None:
        if not hasattr(self, "_transport"):
            return  # `__del__` of one whose making failed early
        if os.getpid() != self._transport.pid:
            self._transport.abandon()  # a forked child's copy must not end its parent's workers
            return
        if torch_private.python_is_exiting():
            return  # the workers are daemons
        self._end_workers()

    def _end_workers(self) -> None:
        if self._transport.closed:
            return  # `__del__` comes again; in a garbage cycle the board's memory may be gone by then
        # Stock's SIGCHLD handler, or Ctrl-C, may raise anywhere in here: each step is taken all the same.
        with contextlib.ExitStack() as steps:
            steps.callback(self._transport.close)
            steps.callback(self._record.end, self, self._transport.board)
            if hasattr(self, "_workers"):  # else torch had not come to start any
                steps.callback(super()._shutdown_workers)
            steps.callback(self._transport.hang_up)


class _MapIterator(CrewIterator):
    """Over a map-style dataset: without the profiler's span, which costs 6 us a batch also when nobody profiles."""

    def __next__(self) -> Any:
        if self._sampler_iter is None or torch_private.profiler_enabled():
            return super().__next__()
        data = self._next_data()  # type: ignore[no-untyped-call]
        self._num_yielded += 1
        return data


# The profiler's span and frameworks that compare names see stock's.
for _iterator in (CrewIterator, _MapIterator):
    _iterator.__name__ = _iterator.__qualname__ = torch_private.StockIterator.__name__
