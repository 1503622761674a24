"""The private names of torch that we use exist in the installed release and do what we take them to do."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch.utils.data import _utils
from torch.utils.data import dataloader as stock

from torchcrew import torch_private


def test_new_shared_takes_a_size_and_a_device() -> None:
    """`UntypedStorage._new_shared(nbytes, device=...)`: inherited, so that deleting ours brings stock's back."""
    assert "_new_shared" not in vars(torch.UntypedStorage)
    storage = torch.UntypedStorage._new_shared(64, device="cpu")
    assert storage.nbytes() == 64
    assert storage.is_shared()


def test_default_collate_asks_new_shared_in_a_worker() -> None:
    """`collate_tensor_fn` goes through `_new_shared`, and is what `default_collate` uses for tensors."""
    assert "_new_shared" in inspect.getsource(_utils.collate.collate_tensor_fn)
    assert _utils.collate.default_collate_fn_map[torch.Tensor] is _utils.collate.collate_tensor_fn


def test_the_iterator_asks_its_context_for_everything() -> None:
    """torch's iterator makes its queues, its event and its processes through the loader's context, by these names."""
    source = inspect.getsource(stock._MultiProcessingDataLoaderIter.__init__)
    assert "loader.multiprocessing_context" in source
    for call in (
        "multiprocessing_context.Queue()",
        "multiprocessing_context.Event()",
        "multiprocessing_context.Process(",
    ):
        assert call in source


@pytest.mark.parametrize(
    "name", ["_rcvd_idx", "_in_order", "_dataset_kind", "_sampler_iter", "_num_yielded", "_workers", "_workers_status"]
)
def test_iterator_attributes(name: str) -> None:
    """Attributes of torch's iterator that ours reads."""
    source = inspect.getsource(stock._BaseDataLoaderIter) + inspect.getsource(stock._MultiProcessingDataLoaderIter)
    assert f"self.{name}" in source


def test_install_rebinds_the_name_that_stock_looks_up() -> None:
    """`DataLoader._get_iterator` finds the iterator's class by its module global."""
    assert "return _MultiProcessingDataLoaderIter(self)" in inspect.getsource(stock.DataLoader._get_iterator)


def test_exit_flag_and_profiler() -> None:
    """The flag that says the interpreter is exiting, and the question whether a profiler is on."""
    assert torch_private.python_is_exiting() is False
    assert torch_private.profiler_enabled() is False
    with torch.autograd.profiler.profile():
        assert torch_private.profiler_enabled() is True


def test_exception_wrapper() -> None:
    """`ExceptionWrapper(where=...)` takes the exception being handled, and says its type and text."""
    try:
        raise KeyError("x")
    except KeyError:
        wrapper = torch_private.ExceptionWrapper(where="in a test")
    assert wrapper.exc_type is KeyError
    with pytest.raises(KeyError, match="Caught KeyError in a test"):
        wrapper.reraise()


def test_rendezvous_handlers() -> None:
    """`init_process_group` asks the entry "env" of a dict, a function that yields a store, a rank and a size."""
    from torch.distributed import rendezvous

    handlers = torch_private.rendezvous_handlers()
    assert {"env", "tcp", "file"} <= set(handlers)
    assert rendezvous.__globals__["_rendezvous_handlers"] is handlers
    assert inspect.isgeneratorfunction(handlers["env"])
    assert next(iter(inspect.signature(handlers["env"]).parameters)) == "url"


def test_keep_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """`init_process_group` and `new_group` make groups by a module's global, which returns the group first."""
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    for function in (c10d.init_process_group, c10d._new_group_with_tag):
        source = inspect.getsource(function)
        assert re.search(r"pg, \w+ = _new_process_group_helper\(", source)
    monkeypatch.setattr(c10d, "_new_process_group_helper", lambda number, more: (number, more))
    kept: list[int] = []
    restore = torch_private.keep_process_groups(kept.append)
    assert c10d._new_process_group_helper(3, more=4) == (3, 4)
    restore()
    assert c10d._new_process_group_helper(5, more=4) == (5, 4)
    assert kept == [3]


def test_what_training_imports() -> None:
    """Wrapping a model imports a large module, whose name is given to the zygote; so does making an optimizer."""
    assert importlib.util.find_spec(torch_private.IMPORTED_BY_TRAINING) is not None
    assert torch_private.IMPORTED_BY_TRAINING in inspect.getsource(torch.nn.parallel.distributed)


@pytest.fixture
def c10d(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of `init_process_group`, and room for a group of one."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    yield importlib.import_module("torch.distributed.distributed_c10d")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_replace_init_process_group(c10d: Any) -> None:
    """Who has imported the name already gets the replacement, by the decorator's cell; and stock's back."""
    imported = torch.distributed.init_process_group
    assert "func" in imported.__code__.co_freevars
    calls: list[Any] = []

    def wrap(stock: Any) -> Any:
        @functools.wraps(stock)
        def init_process_group(*args: Any, **options: Any) -> Any:
            calls.append((args, options))
            return stock(*args, **options) if args[0] == "unknown" else 4

        return init_process_group

    restore = torch_private.replace_init_process_group(wrap)
    assert imported is torch.distributed.init_process_group is c10d.init_process_group
    assert imported("gloo", rank=0) == 4
    with pytest.raises(AssertionError, match="world_size must be positive"):
        imported("unknown", store=torch.distributed.HashStore())
    assert [args for args, _ in calls] == [("gloo",), ("unknown",)]
    restore()
    with pytest.raises(AssertionError, match="world_size must be positive"):
        imported("gloo", store=torch.distributed.HashStore())
    assert len(calls) == 2


def test_replace_init_process_group_that_has_no_cell(monkeypatch: pytest.MonkeyPatch, c10d: Any) -> None:
    """Where it is no decorated function, the names are bound anew; what somebody else binds later stays."""

    def plain(*_: Any) -> int:
        return 3

    for module in (c10d, torch.distributed):
        monkeypatch.setattr(module, "init_process_group", plain)
    restore = torch_private.replace_init_process_group(lambda stock: lambda *args: stock(*args) + 1)
    assert torch.distributed.init_process_group() == c10d.init_process_group() == 4
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda: 5)
    restore()
    assert (torch.distributed.init_process_group(), c10d.init_process_group()) == (5, 3)


def test_set_group_timeout(c10d: Any, tmp_path: Path) -> None:
    """Gloo's backend and the store get it; what is no timedelta is stock's TypeError."""
    dist: Any = torch.distributed
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    torch_private.set_group_timeout(timedelta(seconds=7))
    assert c10d._get_default_store().timeout == timedelta(seconds=7)
    assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
    with pytest.raises(TypeError, match=r"type datetime\.timedelta, got 7"):
        torch_private.set_group_timeout(7)  # type: ignore[arg-type]


def test_set_group_timeout_of_a_group_in_python(c10d: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own function would only warn that it knows nothing of it."""
    dist: Any = torch.distributed

    class Mine(dist.ProcessGroup):
        given = None

        def set_timeout(self, timeout: timedelta) -> None:
            self.given = timeout

    group = Mine(0, 1)
    monkeypatch.setattr(c10d, "_get_default_group", lambda: group)
    monkeypatch.setattr(c10d, "_get_default_store", lambda: dist.FileStore(str(tmp_path / "store"), 1))
    torch_private.set_group_timeout(timedelta(seconds=7))
    assert group.given == timedelta(seconds=7)


def test_hook_collective() -> None:
    """The functions are decorated; what the decorator calls can be exchanged, and put back, under every name of it."""
    import torch.distributed as dist
    from torch.distributed import barrier

    told: list[object] = []
    undo = torch_private.hook_collective(
        "barrier", lambda args, kwargs: told.append(args), lambda kwargs: told.append("refused"), told.append
    )
    assert undo is not None
    try:
        with pytest.raises(ValueError, match="process group"):
            barrier(None, async_op=True)
        assert told == [(None,), "refused", {"async_op": True}]
        assert barrier is dist.barrier
        assert barrier.__name__ == "barrier"
    finally:
        undo()
    with pytest.raises(ValueError, match="process group"):
        barrier()
    assert len(told) == 3


def test_every_collective_of_this_torch_is_hooked() -> None:
    """What torch decorates for its log of collectives is known by name: a new one should be recorded, too."""
    from torchcrew.launcher import signatures

    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    decorated = {
        name
        for name, value in vars(c10d).items()
        if type(value) is FunctionType and "func" in value.__code__.co_freevars and value.__module__ == c10d.__name__
    }
    others = {"init_process_group", "_store_based_barrier", "shrink_group"}  # they make groups, or are part of that
    others |= {"_coalescing_manager", "_time_estimator", "record_comm"}  # context managers
    assert decorated - others <= set(signatures.COLLECTIVES)


@pytest.mark.parametrize("name", ["isend", "no such function", "ReduceOp"])
def test_what_cannot_be_hooked(name: str) -> None:
    """Functions without a decorator, and what is no function."""
    assert (
        torch_private.hook_collective(name, lambda args, kwargs: None, lambda kwargs: None, lambda kwargs: None) is None
    )


def test_hook_model_steps() -> None:
    """Importing torch imports `DistributedDataParallel`, whose `forward` is looked up in the class at each call."""
    model = torch.nn.parallel.DistributedDataParallel
    stock, told = model.forward, []
    undo = torch_private.hook_model_steps(lambda: told.append("step"))
    assert undo is not None
    try:
        assert inspect.signature(model.forward) == inspect.signature(stock)
        with pytest.raises(AttributeError):
            model.forward(object())
        assert told == ["step"]
    finally:
        undo()
    assert model.forward is stock


def test_watch_default_group() -> None:
    """The default group is set by a global function of the module that makes and destroys it, with one argument."""
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    for function in (c10d.init_process_group, c10d.destroy_process_group):
        assert "_update_default_pg(" in inspect.getsource(function)
    stock, told = c10d._update_default_pg, []
    undo = torch_private.watch_default_group(told.append)
    assert undo is not None
    try:
        c10d._update_default_pg(None)
        assert told == [None]
    finally:
        undo()
    assert c10d._update_default_pg is stock


def test_leave_uncompiled() -> None:
    """torch's compiler has what marks a function as none of its business."""
    compiler = torch._C._dynamo.eval_frame
    assert hasattr(compiler, "skip_code") or {"SKIP", "DEFAULT"} <= set(vars(compiler._FrameAction))

    def function() -> None:
        pass

    torch_private.leave_uncompiled(function)
    torch_private.leave_uncompiled(function, recursive=True)
    assert function._torchdynamo_disable is True  # type: ignore[attr-defined]


def test_without_autograd_tensors_are_written_as_gloo_writes_them() -> None:
    """A leaf that needs a gradient, and one of inference mode; no version is counted up."""
    leaf = torch.ones(3, requires_grad=True)
    with torch.inference_mode():
        other = torch.ones(3)
    with torch_private.without_autograd():
        leaf.data.add_(1)
        other.data.add_(1)
    assert leaf.tolist() == other.tolist() == [2.0, 2.0, 2.0]
    assert leaf.grad_fn is None
    assert leaf._version == 0


def test_a_completed_work_waits_for_its_future() -> None:
    """`Work` made of a future: done when that is, with its result or its error."""
    future: Any = torch.futures.Future()
    work = torch_private.completed_work(future)
    assert not work.is_completed()
    future.set_result([torch.ones(1)])
    work.wait()
    assert work.is_completed()
    assert work.result()[0].item() == 1.0


def test_it_is_known_that_a_thread_runs_a_backward_pass() -> None:
    """In a hook of a gradient, and not before or after."""
    found = []
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda grad: found.append(torch_private.is_in_backward()))
    leaf.sum().backward()
    assert found == [True]
    assert not torch_private.is_in_backward()


def test_the_kind_of_a_reduction() -> None:
    """`ReduceOp.SUM` is a kind itself; options hold an object that has one."""
    kinds: Any = torch.distributed.ReduceOp.RedOpType
    options: Any = torch.distributed.AllreduceOptions()
    options.reduceOp = torch.distributed.ReduceOp.MAX
    assert torch_private.reduce_op_kind(options.reduceOp) == kinds.MAX
    assert torch_private.reduce_op_kind(torch.distributed.ReduceOp.SUM) == kinds.SUM


def test_without_modes_nobody_sees_what_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's dispatch modes, which would see our copies."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it when the first mode is entered
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watching():
        with torch_private.without_modes():
            torch.ones(2).add_(1)
        assert not seen
        torch.ones(2).add_(1)
    assert seen


def test_what_overlaps_itself() -> None:
    """What `expand` gives, and nothing that only has gaps."""
    assert torch_private.overlaps_itself(torch.zeros(1).expand(3))
    assert not torch_private.overlaps_itself(torch.zeros(6)[::2])
