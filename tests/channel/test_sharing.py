"""Tensors as descriptors beside a pickle: shared, whatever they are; torch's errors; nothing left."""

from __future__ import annotations

import copyreg
import gc
import os
import threading
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch

from torchcrew import memory
from torchcrew.channel import sharing
from torchcrew.channel.sharing import Passed, decode_shared, encode_shared
from torchcrew.errors import TooManyDescriptors


def through(obj: Any) -> Any:
    """What arrives in the same process."""
    payload, fds, keep = encode_shared(obj)
    copies = [Passed(os.dup(fd)) for fd in fds]
    del keep
    return decode_shared(payload, copies)


def elsewhere(obj: Any) -> Any:
    """What would arrive in another process: one that has none of the storages."""
    payload, fds, keep = encode_shared(obj)
    copies = [Passed(os.dup(fd)) for fd in fds]
    torch.multiprocessing.reductions.shared_cache.clear()
    received = decode_shared(payload, copies)
    del keep
    return received


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "vector": lambda: torch.arange(10.0),
    "scalar": lambda: torch.tensor(3),
    "transposed": lambda: torch.arange(12).reshape(3, 4).t(),
    "strided": lambda: torch.arange(20)[3::4],
    "expanded": lambda: torch.ones(1).expand(1000),
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
    "float16": lambda: torch.ones(3, dtype=torch.float16),
    "float8": lambda: torch.ones(4).to(torch.float8_e4m3fn),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "bool": lambda: torch.tensor([True, False]),
    "uint16": lambda: torch.tensor([1, 65535], dtype=torch.uint16),
    "conjugate": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "large": lambda: torch.arange(1_000_000),
    "leaf": lambda: torch.ones(3, requires_grad=True),
    "empty": lambda: torch.empty(0, 3),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_tensors(name: str) -> None:
    """Values, dtype, shape, strides, layout, gradient: all as they were."""
    tensor = TENSORS[name]()
    for received in (through(tensor), elsewhere(tensor)):
        assert received.dtype is tensor.dtype
        assert received.shape == tensor.shape
        assert received.layout is tensor.layout
        assert received.requires_grad == tensor.requires_grad
        if tensor.layout is torch.strided:
            assert received.stride() == tensor.stride() or tensor.is_neg()  # of which a copy is sent
            assert received.resolve_conj().resolve_neg().tolist() == tensor.resolve_conj().resolve_neg().tolist()
        else:
            assert torch.equal(received.to_dense(), tensor.to_dense())


@pytest.mark.parametrize("name", [name for name in TENSORS if name not in ("empty", "sparse", "csr", "negative")])
def test_both_see_writes(name: str) -> None:
    """Whatever the tensor, its memory is the sender's."""
    tensor = TENSORS[name]()
    received = elsewhere(tensor)
    with torch.no_grad():
        tensor.fill_(0)
    assert received.data_ptr() != tensor.data_ptr()
    assert not received.detach().resolve_conj().to(torch.complex128).any()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_special_tensors() -> None:
    """Nested, meta, quantized: as torch does it."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert [part.tolist() for part in through(nested).unbind()] == [[1, 1], [1, 1, 1]]
    meta = torch.ones(3, device="meta")
    assert through(meta).device.type == "meta"
    parameter = torch.nn.Parameter(torch.ones(3))
    received = through(parameter)
    assert type(received) is torch.nn.Parameter
    assert received.requires_grad
    assert type(through(torch.nn.Parameter(torch.ones(2), requires_grad=False))) is torch.nn.Parameter


def test_what_torch_refuses() -> None:
    """Its words."""
    with pytest.raises(RuntimeError, match="Cowardly refusing to serialize non-leaf tensor"):
        encode_shared(torch.ones(3, requires_grad=True) * 2)
    hooked = torch.ones(3, requires_grad=True)
    hooked.register_hook(print)
    with pytest.warns(UserWarning, match="backward hook"):
        encode_shared(hooked)


def test_storages_are_shared_once() -> None:
    """In a message and across messages, views show the same memory; identity is kept."""
    tensor = torch.zeros(10)
    payload, fds, _ = encode_shared([tensor, tensor[2:], tensor, tensor.untyped_storage()])
    assert len(fds) == 1
    whole, part, same, storage = through([tensor, tensor[2:], tensor, tensor.untyped_storage()])
    assert whole is same
    part.fill_(1)
    assert tensor.sum() == 8
    assert storage.data_ptr() == tensor.data_ptr()
    one, two = elsewhere(tensor), None
    payload, fds, _ = encode_shared(tensor)
    two = decode_shared(payload, [Passed(os.dup(fd)) for fd in fds])
    assert two.data_ptr() in (one.data_ptr(), tensor.data_ptr())


def test_aliases_move_along() -> None:
    """Every tensor over the storage is shared afterwards, and sees the same."""
    tensor = torch.zeros(10)
    row, detached = tensor[3], tensor.detach()
    encode_shared(tensor)
    assert row.is_shared()
    assert detached.is_shared()
    tensor.fill_(7)
    assert row == 7
    assert detached.sum() == 70


def test_a_module() -> None:
    """Parameters, buffers and structure."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    received = elsewhere(module)
    for name, value in module.state_dict().items():
        assert torch.equal(received.state_dict()[name], value)
    with torch.no_grad():
        module[0].weight.fill_(5)
    assert (received[0].weight == 5).all()


def test_arrays_are_copies() -> None:
    """As with stock: numpy has no shared memory."""
    array = np.arange(5)
    received = through(array)
    array[0] = 9
    assert received.tolist() == [0, 1, 2, 3, 4]
    assert received.flags.writeable


def test_no_name_in_dev_shm() -> None:
    """A memfd; and torch's own sharing is left as it is."""
    _, fds, keep = encode_shared(torch.ones(3))
    assert os.readlink(f"/proc/self/fd/{fds[0]}").startswith("/memfd:torchcrew-storage")
    shared = torch.ones(3).share_memory_()
    address = shared.data_ptr()
    _, fds, keep = encode_shared(shared)
    assert shared.data_ptr() == address
    assert "memfd" not in os.readlink(f"/proc/self/fd/{fds[0]}")
    del keep


@pytest.mark.leaks_allowed(reason="torch starts a manager for its files, for good")
def test_file_system_strategy() -> None:
    """Torch's other way has no descriptors."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        tensor = torch.ones(3)
        payload, fds, _ = encode_shared(tensor)
        assert fds == []
        assert decode_shared(payload, []).sum() == 3
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def test_what_a_user_registered_comes_first() -> None:
    """`ForkingPickler.register` for a type that we pickle ourselves."""
    registered: dict[type, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    before = registered[torch.Tensor]
    registered[torch.Tensor] = lambda tensor: (str, ("mine",))
    try:
        assert through([torch.ones(3)]) == ["mine"]
    finally:
        registered[torch.Tensor] = before
    copyreg.pickle(Registered, lambda obj: (str, ("by copyreg",)))
    assert through(Registered()) == "by copyreg"


class Registered:
    """Pickled by a registration."""


def test_threads_that_send_the_same_tensor() -> None:
    """It moves once; nobody reads memory that is gone."""
    for _ in range(20):
        tensor = torch.arange(200_000)
        results: list[Any] = []
        threads = [threading.Thread(target=lambda: results.append(through(tensor))) for _ in range(4)]  # noqa: B023
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 4
        for received in results:
            assert received.data_ptr() == tensor.data_ptr()
        assert torch.equal(tensor, torch.arange(200_000))


def test_an_error_in_the_middle_leaves_nothing() -> None:
    """The next message has nothing of it; descriptors close."""
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(AttributeError):
        encode_shared([torch.ones(3), lambda: None])
    payload, fds, _ = encode_shared(1)
    assert fds == []
    assert decode_shared(payload, []) == 1
    copies = [Passed(os.dup(0)) for _ in range(3)]
    with pytest.raises(EOFError):
        decode_shared(b"", copies)
    del copies
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_descriptor_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that says what to do, on both sides."""

    def refuse(*_: Any) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(sharing.spares, "take", refuse)
    tensor = torch.ones(3)
    with pytest.raises(TooManyDescriptors, match="every shared tensor keeps one"):
        encode_shared(tensor)
    assert not tensor.is_shared()


def test_large_memory_is_used_again() -> None:
    """When nobody has the tensor any more; and never before."""
    memory.trim()
    tensor = torch.full((300_000,), 1.0)
    _, fds, keep = encode_shared(tensor)
    number = os.fstat(fds[0]).st_ino
    copy = Passed(os.dup(fds[0]))
    del tensor, keep
    other = torch.full((300_000,), 2.0)
    assert os.fstat(encode_shared(other)[1][0]).st_ino != number
    del copy
    again = torch.full((300_000,), 3.0)
    assert os.fstat(encode_shared(again)[1][0]).st_ino == number
    assert (again == 3).all()
    assert (other == 2).all()
