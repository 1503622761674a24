"""Every private name of torch that torchcrew uses, in one place, with why it is needed.

`tests/test_torch_private.py` asks the installed torch for each of them, so that a release that moves one fails with
its name and not somewhere in a training run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import types
import warnings
from collections.abc import Callable
from datetime import timedelta
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
    "completed_work",
    "dataloader_module",
    "hook_collective",
    "hook_model_steps",
    "is_in_backward",
    "keep_process_groups",
    "leave_uncompiled",
    "overlaps_itself",
    "profiler_enabled",
    "python_is_exiting",
    "reduce_op_kind",
    "rendezvous_handlers",
    "replace_init_process_group",
    "set_group_timeout",
    "shared_descriptor",
    "shared_storage",
    "stock_get_iterator",
    "swap_storages",
    "watch_default_group",
    "without_autograd",
    "without_modes",
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


def keep_process_groups(kept: Callable[[Any], object]) -> Callable[[], None]:
    """Have ``kept`` called with every process group that this process makes from now on; the result ends that.

    Both `init_process_group` and `new_group` make theirs by the module's global ``_new_process_group_helper``.
    """
    module: Any = importlib.import_module("torch.distributed.distributed_c10d")
    stock = getattr(module, "_new_process_group_helper", None)
    if stock is None:
        return lambda: None

    @functools.wraps(stock)
    def _new_process_group_helper(*args: Any, **options: Any) -> Any:
        made = stock(*args, **options)
        kept(made[0])
        return made

    def restore() -> None:
        if module._new_process_group_helper is _new_process_group_helper:
            module._new_process_group_helper = stock

    module._new_process_group_helper = _new_process_group_helper
    return restore


def replace_init_process_group(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Have `init_process_group` do what ``wrap(stock)`` does, also where its name has been imported already.

    torch's function is a decorator's wrapper, whose cell ``func`` has what it calls. ``wrap`` gets that, and should
    return a function with the same name. Where a release or somebody else has put another function in its place, the
    names in torch's modules are bound anew instead.

    Returns:
        A function that puts stock's back.
    """
    module: Any = importlib.import_module("torch.distributed.distributed_c10d")
    outer = module.init_process_group
    names = getattr(getattr(outer, "__code__", None), "co_freevars", ())
    if "func" in names:
        cell = outer.__closure__[names.index("func")]
        stock = cell.cell_contents
        ours = cell.cell_contents = wrap(stock)

        def restore() -> None:
            if cell.cell_contents is ours:
                cell.cell_contents = stock

        return restore

    ours = wrap(outer)

    def bind(new: Any, former: Any) -> None:
        places: tuple[Any, ...] = (module, importlib.import_module("torch.distributed"))
        for place in places:
            if getattr(place, "init_process_group", None) is former:
                place.init_process_group = new

    bind(ours, outer)
    return lambda: bind(outer, ours)


def set_group_timeout(timeout: timedelta) -> None:
    """Give the default process group, and its store, the timeout that `init_process_group` would have given them."""
    module: Any = importlib.import_module("torch.distributed.distributed_c10d")
    module._check_valid_timeout(timeout)
    module._get_default_store().set_timeout(timeout)
    group = module._get_default_group()
    if type(group) is not module.ProcessGroup:  # one that is written in Python, of which torch's function knows nothing
        group.set_timeout(timeout)
        return
    with warnings.catch_warnings():  # backends that are neither NCCL nor gloo have none
        warnings.simplefilter("ignore", UserWarning)
        module._set_pg_timeout(timeout)


def reduce_op_kind(op: Any) -> Any:
    """The kind of a `ReduceOp`, be it the kind itself or one with it."""
    return getattr(op, "op", op)


def without_autograd() -> Any:
    """A context like `torch.inference_mode`, at a quarter of its cost.

    In it any tensor can be written through its `data`, and autograd takes no notice: as gloo writes it.
    """
    return torch._C._InferenceMode(True)


def without_modes() -> Any:
    """A context in which no mode of the user's (`TorchDispatchMode`) sees what is called; free where there is none."""
    if not torch._C._len_torch_dispatch_stack():
        return contextlib.nullcontext()
    return torch._C._DisableTorchDispatch()


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether several elements of a tensor surely lie in one place of the memory."""
    return bool(torch._debug_has_internal_overlap(tensor) == 1)


def is_in_backward() -> bool:
    """Whether this thread runs a backward pass, as when `DistributedDataParallel` has a bucket reduced."""
    return torch._C._current_graph_task_id() >= 0


def completed_work(future: Any) -> Any:
    """A `Work` of `torch.distributed` that is done when a `torch.futures.Future` is."""
    module: Any = importlib.import_module("torch._C._distributed_c10d")
    return module._create_work_from_future(future)


def hook_collective(
    name: str,
    begin: Callable[[tuple[Any, ...], dict[str, Any]], object],
    refused: Callable[[dict[str, Any]], object],
    end: Callable[[dict[str, Any]], object],
) -> Callable[[], None] | None:
    """Have ``begin(args, kwargs)`` and ``end(kwargs)`` called around the function ``torch.distributed.<name>``.

    These functions are decorated for logging: what programs have imported is a wrapper, which finds the function
    itself in a cell of its closure. Exchanging what is in the cell reaches every program, whenever it has imported
    the wrapper, and leaves the wrapper what it was to those who compare it (torch's compiler, coalescing).

    Args:
        begin: what it raises, the caller sees.
        refused: called before ``end`` where the function finds its arguments wrong.
        end: always called; with the very same dict.

    Returns:
        What undoes it; None where this torch has no such function, or has it undecorated.
    """
    module: Any = importlib.import_module("torch.distributed.distributed_c10d")
    wrapper = getattr(module, name, None)
    if not isinstance(wrapper, types.FunctionType) or "func" not in wrapper.__code__.co_freevars:
        return None
    cell = (wrapper.__closure__ or ())[wrapper.__code__.co_freevars.index("func")]
    stock = cell.cell_contents

    def hooked(*args: Any, **kwargs: Any) -> Any:
        try:
            begin(args, kwargs)
            return stock(*args, **kwargs)
        except (TypeError, ValueError):
            refused(kwargs)
            raise
        finally:
            end(kwargs)

    # Warnings are given in the name of the caller's module: it must be torch's, as it is without this function.
    names = {"__name__": wrapper.__globals__["__name__"], "__builtins__": __builtins__}
    ours = types.FunctionType(hooked.__code__, names, stock.__name__, None, hooked.__closure__)
    functools.update_wrapper(ours, stock)
    leave_uncompiled(ours)
    cell.cell_contents = ours

    return _undo(cell, "cell_contents", ours, stock)


def _undo(owner: Any, name: str, ours: Any, stock: Any) -> Callable[[], None]:
    """What puts stock's function back, unless somebody has put another in the place of ours."""

    def undo() -> None:
        if getattr(owner, name) is ours:
            setattr(owner, name, stock)

    return undo


def hook_model_steps(before: Callable[[], object]) -> Callable[[], None] | None:
    """Have ``before()`` called at each `DistributedDataParallel.forward`; what undoes it, or None without that class.

    Importing torch has imported the class.
    """
    module = sys.modules.get("torch.nn.parallel.distributed")
    model: Any = getattr(module, "DistributedDataParallel", None)
    if model is None:
        return None
    stock = model.forward

    @functools.wraps(stock)
    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        before()
        return stock(self, *inputs, **kwargs)

    leave_uncompiled(forward)
    model.forward = forward

    return _undo(model, "forward", forward, stock)


def watch_default_group(changed: Callable[[Any], object]) -> Callable[[], None] | None:
    """Have ``changed(group)`` called when the default group is made or, with None, destroyed; what undoes it.

    Both go through the module's global ``_update_default_pg``; None where this torch has none.
    """
    module: Any = importlib.import_module("torch.distributed.distributed_c10d")
    stock = getattr(module, "_update_default_pg", None)
    if stock is None:
        return None

    @functools.wraps(stock)
    def _update_default_pg(pg: Any) -> None:
        stock(pg)
        changed(pg)

    module._update_default_pg = _update_default_pg

    return _undo(module, "_update_default_pg", _update_default_pg, stock)


def leave_uncompiled(function: Any, recursive: bool = False) -> None:
    """Have `torch.compile` run this function as it is: what it writes is no part of a graph, or would be a constant.

    That is what ``torch.compiler.disable`` is for; but it imports the compiler, which takes longer than many programs.

    Args:
        recursive: also what the function calls. A torch before 2.7 tries to compile that, and gives it up.
    """
    function._torchdynamo_disable = True
    compiler: Any = torch._C._dynamo.eval_frame
    if hasattr(compiler, "_FrameExecStrategy"):
        skip, default = compiler._FrameAction.SKIP, compiler._FrameAction.DEFAULT
        strategy = compiler._FrameExecStrategy(skip, skip if recursive else default)
        compiler.set_code_exec_strategy(function.__code__, strategy)
    elif hasattr(compiler, "skip_code"):
        compiler.skip_code(function.__code__)
