"""Every private name of torch that torchcrew uses, in one place, with why it is needed.

`tests/test_torch_private.py` asks the installed torch for each of them, so that a release that moves one fails with
its name and not somewhere in a training run.
"""

from __future__ import annotations

import functools
import importlib
import os
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._utils import ExceptionWrapper  # carries a worker's exception: type and text; `reraise()` is stock's text
from torch.utils.data import _utils
from torch.utils.data import dataloader as dataloader_module  # the module whose global `install()` rebinds
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as StockIterator

__all__ = (
    "IMPORTED_BY_TRAINING",
    "ITERABLE",
    "ExceptionWrapper",
    "StockIterator",
    "allocate_batches_with",
    "dataloader_module",
    "keep_process_groups",
    "profiler_enabled",
    "python_is_exiting",
    "rendezvous_handlers",
    "shared_descriptor",
    "shared_storage",
    "stock_get_iterator",
    "swap_storages",
)


#: `_dataset_kind` of a loader over an `IterableDataset`.
ITERABLE = dataloader_module._DatasetKind.Iterable
#: The large part of torch that the first optimizer, or the first data-parallel wrapper of a model, imports.
IMPORTED_BY_TRAINING = "torch._dynamo"
#: Whether a profiler records in this thread.
profiler_enabled = torch._C._autograd._profiler_enabled
#: A storage over ``(fd, nbytes)`` that duplicates the descriptor and keeps its own; and that descriptor of a storage.
shared_storage: Callable[[int, int], Any] = torch.UntypedStorage._new_shared_fd_cpu  # type: ignore[attr-defined]
shared_descriptor = torch.UntypedStorage._share_fd_cpu_
#: Exchanges the memory of two storages under all their tensors; None in a release without it.
swap_storages: Callable[[Any, Any], None] | None = getattr(torch.UntypedStorage, "_swap_data_ptr_", None)


def python_is_exiting() -> bool:
    """Whether the interpreter is shutting down, in which case stock's shutdown of workers does nothing."""
    return _utils is None or _utils.python_exit_status is not False


def stock_get_iterator(loader: Any, iterator: type) -> Any:
    """``DataLoader._get_iterator`` as it stands in torch, but with ``iterator`` for its multi-process iterator's class.

    It is the same code under the same module's name, so that the warnings it gives are stock's, place included.
    """
    names = {**vars(dataloader_module), StockIterator.__name__: iterator}
    return types.FunctionType(dataloader_module.DataLoader._get_iterator.__code__, names)(loader)


def allocate_batches_with(new_shared: Callable[[int], torch.UntypedStorage], small: int) -> None:
    """Make this worker's collate functions put batches of ``small`` bytes and more where ``new_shared(nbytes)`` says.

    ``UntypedStorage._new_shared`` is what `default_collate` (and PyG's collater, and everybody who copied it) calls in
    a worker to get memory that the trainer can see; in stock it is a file in /dev/shm. For small batches the detour
    costs more than the memory, so `default_collate` just stacks them. A child that the worker forks gets stock's back:
    the memory has one owner.
    """
    stock = torch.UntypedStorage._new_shared

    def _new_shared(size: int, *, device: Any = "cpu") -> torch.UntypedStorage:
        if torch.device(device).type == "cpu":
            return new_shared(size)
        return stock(size, device=device)  # type: ignore[no-any-return,no-untyped-call]

    def restore() -> None:
        if "_new_shared" in vars(torch.UntypedStorage):
            del torch.UntypedStorage._new_shared  # the inherited one is stock's

    torch.UntypedStorage._new_shared = staticmethod(_new_shared)  # type: ignore[method-assign]
    os.register_at_fork(after_in_child=restore)
    registered = _utils.collate.default_collate_fn_map
    if registered.get(torch.Tensor) is _utils.collate.collate_tensor_fn:  # else the user has put something there
        registered[torch.Tensor] = _stacking_below(small)


def _stacking_below(small: int) -> Callable[..., torch.Tensor]:
    """`collate_tensor_fn`, but batches of less than ``small`` bytes are stacked in private memory."""
    stock = _utils.collate.collate_tensor_fn

    def collate_tensor_fn(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        first = batch[0]
        if (
            type(first) is torch.Tensor
            and first.layout is torch.strided
            and first.nbytes * len(batch) < small
            and first.is_contiguous()
            and not first.is_quantized
            and not first.is_conj()
        ):
            # What goes wrong here, or comes out otherwise than with stock's `out=`, stock does below in its own way.
            try:
                stacked = torch.stack(batch, 0)
            except Exception:
                pass
            else:
                if stacked.dtype is first.dtype and type(stacked) is torch.Tensor and not stacked.requires_grad:
                    return stacked
        return stock(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]

    return collate_tensor_fn


def rendezvous_handlers() -> dict[str, Callable[..., Any]]:
    """What `init_process_group` asks for a store, by the scheme of its ``init_method``; "env" when it has none."""
    # `torch.distributed.rendezvous` is also the name of a function that hides the module.
    module = importlib.import_module("torch.distributed.rendezvous")
    handlers: dict[str, Callable[..., Any]] = module._rendezvous_handlers
    return handlers


def keep_process_groups(kept: Callable[[Any], object]) -> None:
    """Have ``kept`` called with every process group that this process makes from now on.

    Both `init_process_group` and `new_group` make theirs by the module's global ``_new_process_group_helper``.
    """
    module: Any = importlib.import_module("torch.distributed.distributed_c10d")
    stock = getattr(module, "_new_process_group_helper", None)
    if stock is None:
        return

    @functools.wraps(stock)
    def _new_process_group_helper(*args: Any, **options: Any) -> Any:
        made = stock(*args, **options)
        kept(made[0])
        return made

    module._new_process_group_helper = _new_process_group_helper
