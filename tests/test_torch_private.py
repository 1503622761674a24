"""The private names of torch that we use exist in the installed release and do what we take them to do."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re

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
    torch_private.keep_process_groups(kept.append)
    assert c10d._new_process_group_helper(3, more=4) == (3, 4)
    assert kept == [3]


def test_what_training_imports() -> None:
    """Wrapping a model imports a large module, whose name is given to the zygote; so does making an optimizer."""
    assert importlib.util.find_spec(torch_private.IMPORTED_BY_TRAINING) is not None
    assert torch_private.IMPORTED_BY_TRAINING in inspect.getsource(torch.nn.parallel.distributed)
