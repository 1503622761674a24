"""Tensors as rows: their elements, or bytes, one behind the other in memory, as collectives move them.

What is written to a row that is not the tensor's own memory is copied into the tensor at the end. Nothing of this does
autograd see.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torchcrew.torch_private import overlaps_itself

__all__ = ("as_bytes", "check_dense", "check_writable", "flat", "in_a_row", "lies_in_a_row", "write_back")


def lies_in_a_row(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor, as they are, lie in memory one behind the other."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in a row: a view if they lie so, else a copy. Autograd does not see what is written to it."""
    data = tensor.data if lies_in_a_row(tensor) else tensor.data.resolve_conj().resolve_neg().contiguous()
    row = data.view(-1)
    # A single element lies in a row whatever its stride is; a view as bytes wants the stride 1.
    return row if row.stride(0) == 1 else row.as_strided((row.numel(),), (1,))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: a view if its elements lie in a row, else a copy."""
    return flat(tensor).view(torch.uint8)


@contextmanager
def in_a_row(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors to be written whose elements lie in a row; what is written to stand-ins is copied at the end.

    Raises:
        ValueError: see `check_writable`.
    """
    for tensor in tensors:
        check_writable(tensor)
    rows = [tensor if lies_in_a_row(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
    yield rows
    for tensor, row in zip(tensors, rows, strict=True):
        if row is not tensor:
            tensor.data.copy_(row)


def write_back(tensor: torch.Tensor, row: torch.Tensor) -> None:
    """Copy into a tensor what was written to `flat`, or `as_bytes`, of it, where that is a copy."""
    if not lies_in_a_row(tensor):
        tensor.data.copy_(row.view(tensor.dtype).view(tensor.shape))


def check_writable(tensor: torch.Tensor) -> None:
    """Refuse a tensor of which several elements lie in one place, as of `expand`.

    Raises:
        ValueError: it is one.
    """
    if not tensor.is_contiguous() and overlaps_itself(tensor):
        raise ValueError(
            f"a collective cannot write to a tensor of which several elements share their memory, like that of shape "
            f"{tuple(tensor.shape)} and strides {tensor.stride()}: give it a clone()"
        )


def check_dense(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse what is not dense, and in the memory of the CPU.

    Raises:
        ValueError: says what it is.
    """
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            device = tensor.device.type
            kind = f"{device} tensor" if device != "cpu" else f"tensor of layout {tensor.layout}"
            hint = ": for a GPU make a group of the backend nccl" if device == "cuda" else ""
            raise ValueError(
                f"the process group crew moves dense tensors in the memory of the CPU, but got a {kind}{hint}"
            )
        if type(tensor) is not torch.Tensor and isinstance(tensor, _without_memory()):
            raise ValueError(
                f"a {type(tensor).__name__} has no memory of its own that a collective could move: of a DTensor, "
                "give it to_local()"
            )


def _without_memory() -> tuple[Any, ...]:
    """The classes of tensors that only stand for others, of modules that are imported."""
    classes = (("torch.distributed.tensor", "DTensor"), ("torch._subclasses.fake_tensor", "FakeTensor"))
    found = [getattr(sys.modules.get(module), name, None) for module, name in classes]
    return tuple(kind for kind in found if kind is not None)
