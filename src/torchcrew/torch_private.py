"""Every private name of torch that torchcrew uses, in one place, with why it is needed.

`tests/test_torch_private.py` asks the installed torch for each of them, so that a release that moves one fails with
its name and not somewhere in a training run.
"""

from __future__ import annotations

import torch
from torch._utils import ExceptionWrapper  # carries a worker's exception: type and text; `reraise()` is stock's text
from torch.utils.data import dataloader as dataloader_module  # the module whose global `install()` rebinds
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as StockIterator

__all__ = (
    "ITERABLE",
    "ExceptionWrapper",
    "StockIterator",
    "dataloader_module",
    "profiler_enabled",
    "python_is_exiting",
    "replace_new_shared",
)


#: `_dataset_kind` of a loader over an `IterableDataset`.
ITERABLE = dataloader_module._DatasetKind.Iterable
#: Whether a profiler records in this thread.
profiler_enabled = torch._C._autograd._profiler_enabled


def python_is_exiting() -> bool:
    """Whether the interpreter is shutting down, in which case stock's shutdown of workers does nothing."""
    utils = dataloader_module._utils
    return utils is None or utils.python_exit_status is not False


def replace_new_shared(function: object) -> None:
    """Make ``UntypedStorage._new_shared`` call ``function(nbytes)`` for CPU storages in this process.

    ``_new_shared`` is what `default_collate` (and PyG's collater, and everybody who copied it) calls in a worker to get
    memory that the trainer can see; in stock it is a file in /dev/shm.
    """
    stock = torch.UntypedStorage._new_shared

    def _new_shared(cls: type, size: int, *, device: object = "cpu") -> torch.UntypedStorage:
        if torch.device(device).type == "cpu":  # type: ignore[arg-type]
            return function(size)  # type: ignore[operator,no-any-return]
        return stock(size, device=device)  # type: ignore[arg-type]

    torch.UntypedStorage._new_shared = classmethod(_new_shared)  # type: ignore[assignment,method-assign]
