"""`reduction`: each operation and dtype against numpy, in the order of the ranks, wherever the parts are in memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.distributed import ReduceOp

from tests.collectives import oracle
from torchcrew.collectives.reduction import operation
from torchcrew.collectives.streams import cut

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_every_operation_of_every_type(dtype: torch.dtype) -> None:
    """Bit for bit what one process computes, for 1 to 5 ranks."""
    for name in oracle.OPERATIONS:
        if not oracle.supports(name, dtype):
            with pytest.raises(ValueError, match=rf"{name} of {dtype} is not a reduction"):
                operation(oracle.operation(name), dtype)
            continue
        reduce = operation(oracle.operation(name), dtype)
        for ranks in (1, 2, 3, 5):
            parts = [oracle.value(dtype, (517,), seed) for seed in range(ranks)]
            out = torch.empty(517, dtype=dtype)
            reduce(out, parts)
            reduce.after(out, ranks)
            assert oracle.same(out, oracle.reduced(name, parts)), (name, ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.uint16, torch.complex64], ids=str)
def test_into_the_first_of_them(dtype: torch.dtype) -> None:
    """As all_reduce writes its own tensor, on rank 0 while it is the first part."""
    parts = [oracle.value(dtype, (100,), seed) for seed in range(3)]
    expected = oracle.reduced("SUM", parts)
    operation(ReduceOp.SUM, dtype)(parts[0], parts)
    assert oracle.same(parts[0], expected)


def test_any_part_of_a_tensor_is_reduced_as_in_the_whole() -> None:
    """Vector instructions treat the last elements otherwise than the first: not with other bits."""
    parts = [oracle.value(torch.bfloat16, (1000,), seed) for seed in range(3)]
    reduce = operation(ReduceOp.PRODUCT, torch.bfloat16)
    whole = torch.empty(1000, dtype=torch.bfloat16)
    reduce(whole, parts)
    for begin, end in ((0, 1), (1, 3), (63, 130), (129, 1000)):
        out = torch.empty(end - begin, dtype=torch.bfloat16)
        reduce(out, [part[begin:end] for part in parts])
        assert oracle.same(out, whole[begin:end])


def test_not_a_number_and_infinity() -> None:
    """They pass through sums and products; a minimum or maximum with one that is none is none, as torch has it."""
    one = torch.tensor([float("nan"), float("inf"), 1.0, -0.0])
    two = torch.tensor([1.0, -float("inf"), float("nan"), 0.0])
    out = torch.empty(4)
    for op, function in ((ReduceOp.SUM, torch.add), (ReduceOp.MIN, torch.minimum), (ReduceOp.MAX, torch.maximum)):
        operation(op, torch.float32)(out, [one, two])
        assert np.array_equal(out.numpy(), function(one, two).numpy(), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bits8, torch.bits16, torch.quint8], ids=str)
def test_types_that_are_no_numbers(dtype: torch.dtype) -> None:
    """Refused before the ranks meet, not in the middle of a collective."""
    with pytest.raises(ValueError, match="is not a reduction that the process group crew can do"):
        operation(ReduceOp.SUM, dtype)


def test_an_operation_with_a_factor() -> None:
    """NCCL's alone."""
    with pytest.raises(ValueError, match="PREMUL_SUM"):
        operation(torch.distributed._make_nccl_premul_sum(2.0), torch.float32)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 64])
def test_parts_cover_every_element_once(size: int) -> None:
    """Also where there are fewer elements than ranks."""
    for count in (0, 1, 63, 64, 65, 1000, 8193, 1_000_001):
        parts = cut(count, size)
        assert len(parts) == size
        assert parts[0][0] == 0
        assert parts[-1][1] == count
        assert all(before[1] == after[0] for before, after in itertools.pairwise(parts))
