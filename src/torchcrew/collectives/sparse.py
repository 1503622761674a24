"""The sum of sparse tensors, as `DistributedDataParallel` wants it of an `Embedding` with sparse gradients.

    each rank   coalesced ─► what it is: number of values, dtype, shape ─► gathered, compared by all
                             indices, values ─► gathered ─► summed up in the order of the ranks ─► into the tensor

It is what gloo does, with the same functions of torch: the same bits. The sum has the indices of all ranks; those whose
values cancel each other stay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from torchcrew.errors import CollectiveMismatch
from torchcrew.torch_private import reduce_op_kind

__all__ = ("all_reduce",)

#: Bytes in which a tensor is described: torch's have up to 64 dimensions.
_TEXT = 2048
_KINDS: Any = ReduceOp.RedOpType
#: Copies each rank's tensor into one of a list; sizes may differ.
_Gather = Callable[[Sequence[torch.Tensor], torch.Tensor], None]


def all_reduce(tensors: Sequence[torch.Tensor], op: Any, ranks: Sequence[int], gather: _Gather) -> None:
    """Sum up sparse COO tensors, each in place; they are coalesced then.

    Args:
        tensors: of this rank.
        op: a sum.
        ranks: what people call the ranks, by place.
        gather: how a tensor gets to all of them.

    Raises:
        ValueError: they cannot be summed up; nothing has been exchanged.
        CollectiveMismatch: the ranks' tensors differ in their shapes or dtypes; all ranks raise it.
    """
    for tensor in tensors:
        _check(tensor, op)
    # Not in the inference mode of other collectives: a sparse tensor gets new parts, which the user may change.
    with torch.inference_mode(False), torch.no_grad():
        for tensor in tensors:
            _all_reduce(tensor, ranks, gather)


def _check(tensor: torch.Tensor, op: Any) -> None:
    kind = reduce_op_kind(op)
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(f"all_reduce of sparse tensors together with one of layout {tensor.layout}")
    if kind != _KINDS.SUM:
        raise ValueError(f"sparse tensors can only be summed up, but the reduction is {kind.name}")
    if tensor.device.type != "cpu" or not _has_sum(tensor.dtype):
        raise ValueError(f"torch cannot add sparse tensors of {tensor.dtype} on the device {tensor.device}")


@functools.cache
def _has_sum(dtype: torch.dtype) -> bool:
    one = torch.ones(1, dtype=dtype).to_sparse()
    try:
        one + one
    except RuntimeError:  # torch's NotImplementedError is one
        return False
    return True


def _all_reduce(tensor: torch.Tensor, ranks: Sequence[int], gather: _Gather) -> None:
    mine = tensor.coalesce()
    counts = _compare(mine, ranks, gather)
    dense = mine.values().shape[1:]
    indices = [torch.empty((mine.sparse_dim(), count), dtype=torch.int64) for count in counts]
    values = [torch.empty((count, *dense), dtype=mine.dtype) for count in counts]
    gather(indices, mine.indices())
    gather(values, mine.values())
    total, *others = (
        torch.sparse_coo_tensor(index, value, mine.shape, check_invariants=False)
        for index, value in zip(indices, values, strict=True)
    )
    for other in others:
        total += other
    tensor.copy_(total.coalesce())


def _compare(mine: torch.Tensor, ranks: Sequence[int], gather: _Gather) -> list[int]:
    """How many values each rank has."""
    shape = f"{mine.dtype}, {tuple(mine.shape)}, sparse in {mine.sparse_dim()} of its dimensions"
    own = torch.frombuffer(bytearray(f"{mine.values().shape[0]} {shape}".encode().ljust(_TEXT)), dtype=torch.uint8)
    found = [torch.empty_like(own) for _ in ranks]
    gather(found, own)
    told = [bytes(row.tolist()).decode().strip().split(" ", 1) for row in found]
    if len({text for _, text in told}) > 1:
        lines = "\n".join(f"  rank {ranks[place]}: {text}" for place, (_, text) in enumerate(told))
        raise CollectiveMismatch(f"ranks of one group sum up sparse tensors of different kinds:\n{lines}")
    return [int(count) for count, _ in told]
