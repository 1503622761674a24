"""Reducing tensors element by element, in the order of the ranks: the same bits whoever does it, run after run.

Only `torch`'s elementwise functions, so that a reduction of two is what gloo's is, bit for bit. Dtypes for which torch
has no arithmetic are reduced as others that give the same bits, or, narrow floats, through float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from torchcrew.torch_private import reduce_op_kind

__all__ = ("Operation", "operation")

_KINDS: Any = ReduceOp.RedOpType
_FUNCTIONS: dict[Any, Callable[..., torch.Tensor]] = {
    _KINDS.SUM: torch.add,
    _KINDS.AVG: torch.add,
    _KINDS.PRODUCT: torch.mul,
    _KINDS.MIN: torch.minimum,
    _KINDS.MAX: torch.maximum,
    _KINDS.BAND: torch.bitwise_and,
    _KINDS.BOR: torch.bitwise_or,
    _KINDS.BXOR: torch.bitwise_xor,
}
_BITWISE = frozenset({_KINDS.BAND, _KINDS.BOR, _KINDS.BXOR})
_ORDERED = frozenset({_KINDS.MIN, _KINDS.MAX})
#: Unsigned integers of two's complement add and multiply as the signed ones do; compared, they need a wider type.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
#: The most significant bit, with which unsigned numbers are ordered as signed ones.
_TOP = {torch.int16: -(1 << 15), torch.int32: -(1 << 31), torch.int64: -(1 << 63)}
#: Floats that torch cannot add, in some release.
_NARROW = frozenset(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
)


class Operation:
    """One way to reduce, for one dtype.

    Raises:
        ValueError: there is no such reduction of this dtype.
    """

    def __init__(self, op: ReduceOp, dtype: torch.dtype) -> None:
        self.kind = reduce_op_kind(op)
        self.code = int(self.kind)
        function = _FUNCTIONS.get(self.kind)
        is_number = dtype.is_floating_point or dtype.is_complex
        if function is None or (self.kind in _BITWISE and is_number) or (self.kind in _ORDERED and dtype.is_complex):
            raise ValueError(f"{self.kind.name} of {dtype} is not a reduction that the process group crew can do")
        self.function = function
        if dtype is torch.bool:
            self.function = _of_bool(self.kind, function)
        self.view_as = _SIGNED.get(dtype)
        self.through = torch.float32 if dtype in _NARROW else None
        self._try(dtype)

    def _try(self, dtype: torch.dtype) -> None:
        """Reduce nothing much, here, so that what torch cannot do is found before the ranks meet."""
        try:
            out, *parts = (torch.zeros(16, dtype=torch.uint8).view(dtype) for _ in range(3))
            self(out, parts)
            self.after(out, len(parts))
        except RuntimeError as error:
            raise ValueError(
                f"{self.kind.name} of {dtype} is not a reduction that the process group crew can do: {error}"
            ) from error

    def __call__(self, out: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Reduce ``parts``, flat and of one size and dtype, into ``out``, which may be the first of them."""
        if self.view_as is not None:
            out, parts = out.view(self.view_as), [part.view(self.view_as) for part in parts]
            if self.kind in _ORDERED:
                top = _TOP[self.view_as]
                result = parts[0] ^ top
                for part in parts[1:]:
                    self.function(result, part ^ top, out=result)
                out.copy_(result ^ top)
                return
        elif self.through is not None:
            result = parts[0].to(self.through)
            for part in parts[1:]:
                self.function(result, part.to(self.through), out=result)
            out.copy_(result)
            return
        if len(parts) == 1:
            out.copy_(parts[0])
            return
        function = self.function
        function(parts[0], parts[1], out=out)
        for part in parts[2:]:
            function(out, part, out=out)

    def after(self, out: torch.Tensor, count: int) -> None:
        """What is left to do with the reduction of ``count`` ranks, in place: the average's division."""
        if self.kind != _KINDS.AVG:
            return
        if out.dtype.is_floating_point or out.dtype.is_complex:
            if out.dtype in _NARROW:
                out.copy_(out.to(torch.float32) / count)
            else:
                out.div_(count)
        else:
            out.div_(count, rounding_mode="trunc")


def _of_bool(kind: Any, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Sums of truth are "any", products "all", as torch has them."""
    if kind in (_KINDS.MAX, _KINDS.SUM):
        return torch.logical_or
    if kind in (_KINDS.MIN, _KINDS.PRODUCT):
        return torch.logical_and
    return function


_operations: dict[tuple[int, torch.dtype], Operation] = {}


def operation(op: ReduceOp, dtype: torch.dtype) -> Operation:
    """The one that ``op`` means for ``dtype``; made once.

    Raises:
        ValueError: there is no such reduction.
    """
    kind = reduce_op_kind(op)
    found = _operations.get((int(kind), dtype))
    if found is None:
        found = _operations[int(kind), dtype] = Operation(op, dtype)
    return found
