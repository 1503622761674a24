"""What collectives have to give, computed by one process in the order of the ranks; by numpy where it has the type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

__all__ = ("DTYPES", "OPERATIONS", "average_of", "bits", "offers", "operation", "reduced", "same", "supports", "value")

UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
DTYPES = (torch.bool, *UNSIGNED, *SIGNED, *FLOATS, *NARROW, *COMPLEX)
OPERATIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def value(dtype: torch.dtype, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Numbers of any size that the type has; integers overflow when they are added."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    if dtype.is_complex:
        return torch.randn(tuple(shape), generator=generator, dtype=torch.complex128).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)
    width = torch.empty(0, dtype=dtype).element_size()
    numbers = torch.randint(0, 256, (*shape, width), dtype=torch.uint8, generator=generator)
    return numbers.view(dtype).view(tuple(shape))


def supports(op: str, dtype: torch.dtype) -> bool:
    """Whether there is such a reduction."""
    if op in ("BAND", "BOR", "BXOR"):
        return not (dtype.is_floating_point or dtype.is_complex)
    if op in ("MIN", "MAX"):
        return not dtype.is_complex
    if op == "AVG":
        return dtype not in (torch.bool, torch.complex32, *UNSIGNED[1:])  # torch has no such division
    return True


_NUMPY: dict[str, Any] = {
    "SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


def reduced(op: str, parts: Sequence[torch.Tensor], as_torch: bool = False) -> torch.Tensor:
    """The reduction of the ranks' tensors: one after the other, each step rounded to the type (narrow floats: once).

    Args:
        as_torch: `torch.distributed` hands complex numbers to a backend as pairs of floats.
    """
    if op == "AVG" and parts[0].dtype.is_complex and as_torch:
        return torch.view_as_complex(reduced(op, [torch.view_as_real(part) for part in parts]))
    if op == "AVG":
        return average_of(reduced("SUM", parts), len(parts))
    dtype = parts[0].dtype
    if dtype in (torch.bfloat16, torch.complex32):
        wide = torch.float32 if dtype is torch.bfloat16 else torch.complex64
        result = parts[0]
        for part in parts[1:]:
            result = reduced(op, [result.to(wide), part.to(wide)]).to(dtype)
        return result.clone()
    if dtype in NARROW:
        return reduced(op, [part.to(torch.float32) for part in parts]).to(dtype)
    if dtype.is_complex and op == "PRODUCT":  # numpy may use fused multiplication where torch does not
        product = parts[0].clone()
        for part in parts[1:]:
            product = product * part
        return product
    function = _NUMPY[op]
    with np.errstate(over="ignore"):
        result = parts[0].numpy()
        for part in parts[1:]:
            result = function(result, part.numpy())
    return torch.from_numpy(np.array(result, dtype=result.dtype))


def average_of(total: torch.Tensor, count: int) -> torch.Tensor:
    """Of numbers that add up to ``total``; integers are cut towards zero."""
    if total.dtype in NARROW or total.dtype is torch.bfloat16:
        return (total.to(torch.float32) / count).to(total.dtype)
    if total.dtype.is_floating_point or total.dtype.is_complex:
        return total / count
    return torch.div(total, count, rounding_mode="trunc")


def offers(op: str, dtype: torch.dtype) -> bool:
    """Whether torch passes such a reduction on to a backend."""
    return supports(op, dtype) and not (dtype.is_complex and op == "PRODUCT")


def operation(op: str) -> Any:
    """torch's name of it."""
    return getattr(dist.ReduceOp, op)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in a row."""
    row = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return row.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # of one element, too: its stride is 1


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same, bit for bit; of truth, what is true."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype is torch.bool:  # gloo adds them: a true one has the byte 2
        return torch.equal(bits(one) != 0, bits(other) != 0)
    return torch.equal(bits(one), bits(other))
