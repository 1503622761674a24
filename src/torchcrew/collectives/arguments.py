"""What the arguments of a collective have to be, in groups of one host and of several: refused before ranks meet.

A `ValueError` of these leaves the group usable.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchcrew.collectives.rows import check_dense, check_writable

__all__ = (
    "check_all_gathered",
    "check_all_to_all",
    "check_gathered",
    "check_gathered_into",
    "check_root",
    "check_scattered",
    "parts_of",
)


def check_root(root: int, size: int) -> None:
    """Refuse a root that is no rank of the group."""
    if not 0 <= root < size:
        raise ValueError(f"the root has to be a rank of the group, of 0 to {size - 1}, but is {root}")


def parts_of(out: torch.Tensor, given: Sequence[torch.Tensor], size: int, me: int) -> list[int]:
    """How many elements each rank gets of a reduce_scatter of ``given``: a tensor for each rank, or one for all."""
    check_dense([out, *given])
    check_writable(out)
    sizes = [tensor.numel() for tensor in given]
    if len(given) == 1 and size > 1:
        sizes = [out.numel()] * size
    wrong = len(sizes) != size or sizes[me] != out.numel()
    if wrong or sum(sizes) != sum(tensor.numel() for tensor in given):
        raise ValueError(
            f"reduce_scatter of {size} ranks needs inputs for each of them, as large as their outputs, "
            f"but got {[tuple(tensor.shape) for tensor in given]} for an output of {tuple(out.shape)}"
        )
    if any(tensor.dtype != out.dtype for tensor in given):
        raise ValueError(f"reduce_scatter needs one dtype, but got {given[0].dtype} into {out.dtype}")
    return sizes


def check_all_gathered(outs: Sequence[torch.Tensor], tensor: torch.Tensor, size: int) -> None:
    """Of all_gather into a tensor for each rank."""
    check_dense([*outs, tensor])
    if len(outs) != size:
        raise ValueError(f"all_gather of {size} ranks needs as many outputs, but got {len(outs)}")


def check_gathered(outs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int, size: int, me: int) -> None:
    """Of gather."""
    check_dense([*outs, tensor])
    check_root(root, size)
    if me == root and len(outs) != size:
        raise ValueError(f"gather of {size} ranks needs as many outputs at its root, but got {len(outs)}")
    if me != root and outs:
        raise ValueError("gather needs no outputs at ranks that are not its root")


def check_gathered_into(out: torch.Tensor, tensor: torch.Tensor, size: int) -> None:
    """Of all_gather into one tensor."""
    check_dense([out, tensor])
    if out.numel() != tensor.numel() * size or out.dtype != tensor.dtype:
        raise ValueError(
            f"the output of all_gather has to be {size} times the input, of the same dtype, but is "
            f"{tuple(out.shape)} of {out.dtype} for {tuple(tensor.shape)} of {tensor.dtype}"
        )


def check_scattered(out: torch.Tensor, inputs: Sequence[torch.Tensor], root: int, size: int, me: int) -> None:
    """Of scatter."""
    check_dense([out, *inputs])
    check_root(root, size)
    if len(inputs) != (size if me == root else 0):
        raise ValueError(
            f"scatter needs an input for each of {size} ranks at its root, and none elsewhere, but got {len(inputs)}"
        )
    if any(tensor.numel() != out.numel() or tensor.dtype != out.dtype for tensor in inputs):
        raise ValueError("the inputs of scatter have to be as large as the output, and of its dtype")


def check_all_to_all(outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], size: int) -> None:
    """Of all_to_all."""
    check_dense([*outs, *inputs])
    if len(outs) != size or len(inputs) != size:
        raise ValueError(
            f"all_to_all of {size} ranks needs as many inputs and outputs, but got {len(inputs)} and {len(outs)}"
        )
