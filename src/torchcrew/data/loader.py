"""`DataLoader`, and `install` which puts its engine under every stock loader of the process."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.utils.data

from torchcrew import torch_private
from torchcrew.data.iterator import CrewIterator
from torchcrew.memory.limits import parse_bytes

__all__ = ("DataLoader", "install", "uninstall")

T = TypeVar("T", covariant=True)


class DataLoader(torch.utils.data.DataLoader[T]):
    """`torch.utils.data.DataLoader` on shared memory that is recycled: same batches, order, random draws and errors.

    A worker that dies raises stock's ``RuntimeError`` in ``next()`` at once; all processes below are gone within a
    second of this one's death. Batches are views of shared memory: valid and writable for as long as anyone holds
    them, also after the loader is closed. When the user holds all shared memory of the budget, the next batch raises
    `torchcrew.errors.ArenaFull`; while the user is only slow, the workers wait.

    Everything up to ``in_order`` is stock's, positional and keyword.

    Args:
        multiprocessing_context: stock's values, or ``"zygote"``: workers are forked from one process that has torch
            and this script's modules imported; they start in milliseconds and see what spawned processes see.
        memory_budget: bytes (or "2GB", "512MiB") of shared memory that the batches of one iterator may take: those
            being made, on their way, and held by the user. Default: the variable ``TORCHCREW_BUDGET``, or half of the
            memory limit.
        newer: options of releases of torch that this one does not know are passed on.

    Raises:
        ValueError: stock's texts for stock's options; for ours the text names the option and what it allows.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Any = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Any = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        memory_budget: int | str | None = None,
        **newer: Any,
    ) -> None:
        if memory_budget is not None:
            parse_bytes(memory_budget)
        self.memory_budget = memory_budget
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
            **newer,
        )

    @property
    def multiprocessing_context(self) -> Any:
        return torch.utils.data.DataLoader.multiprocessing_context.fget(self)  # type: ignore[attr-defined]

    @multiprocessing_context.setter
    def multiprocessing_context(self, context: Any) -> None:
        if context == "zygote" and self.num_workers > 0:
            from torchcrew.crew import zygote

            context = zygote.get_context()
        torch.utils.data.DataLoader.multiprocessing_context.fset(self, context)  # type: ignore[attr-defined]

    def _get_iterator(self) -> Any:
        return torch_private.stock_get_iterator(self, CrewIterator)


def install() -> None:
    """Put the engine under every stock ``DataLoader`` of this process, subclasses and existing ones included.

    Iterators that exist go on as they are. Forked children inherit it. Idempotent; `uninstall` takes it back.
    """
    torch_private.dataloader_module._MultiProcessingDataLoaderIter = CrewIterator  # type: ignore[misc]


def uninstall() -> None:
    """Give stock loaders their own engine back; iterators that exist go on as they are. Idempotent."""
    torch_private.dataloader_module._MultiProcessingDataLoaderIter = torch_private.StockIterator  # type: ignore[misc]
