"""Sums of sparse tensors: those of gloo, to the last bit, layout and order; and models that have sparse gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.collectives.ranks import results_of, run

pytestmark = pytest.mark.timeout(60)  # the first ranks of a program come slowly where the machine is busy

_Parts = tuple[list[list[int]], list[Any], torch.Size, torch.dtype, bool, torch.layout]


def _tensors(rank: int) -> Iterator[torch.Tensor]:
    """Sparse ones, as different ranks may have them."""
    generator = torch.Generator().manual_seed(rank)

    def random(indices: tuple[int, int], shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        values = torch.randn((indices[1], *shape[indices[0] :]), generator=generator)
        where = torch.stack(
            [torch.randint(0, size, (indices[1],), generator=generator) for size in shape[: indices[0]]]
        )
        return torch.sparse_coo_tensor(where, (values * 8).to(dtype), shape, check_invariants=True)

    yield random((1, 9), (5,))  # an index many times
    yield random((1, 9), (5,)).coalesce()
    yield random((2, 3 + 4 * rank), (4, 6))  # as many values as each rank likes
    yield random((1, 6 + rank), (4, 3))  # hybrid
    yield random((3, 50), (7, 2, 3, 2, 2))
    yield random((1, 70_000), (100_000, 4))  # larger than a page
    yield torch.sparse_coo_tensor(torch.zeros(1, 0), torch.zeros(0, 2), (4, 2), check_invariants=True)  # nothing
    yield random((1, 3 * rank), (4,))  # nothing in rank 0
    yield torch.eye(3).to_sparse() * (-1) ** rank  # zeros stay
    yield torch.sparse_coo_tensor(torch.zeros(0, 2), torch.ones(2), (), check_invariants=True)
    yield random((1, 2), (5, 0))
    for dtype in (torch.float64, torch.int32, torch.int64, torch.int8, torch.bfloat16):
        yield random((2, 20), (5, 5), dtype)


def _parts(tensor: torch.Tensor) -> _Parts:
    indices, values = tensor._indices().tolist(), tensor._values().tolist()
    return indices, values, tensor.shape, tensor.dtype, tensor.is_coalesced(), tensor.layout


def _sums(rank: int, size: int) -> list[_Parts]:
    found = []
    for number, tensor in enumerate(_tensors(rank)):
        if number % 2:
            dist.all_reduce(tensor)
        else:
            dist.all_reduce(tensor, async_op=True).wait()
        found.append(_parts(tensor))
        tensor._values().mul_(2)  # the user's to change, and to train with
        assert not tensor._values().is_inference()
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_sums_of_gloo(size: int) -> None:
    """Values, their order, dtype, shape and state, in place, of uneven, empty and hybrid tensors."""
    ours, gloos = (run(_sums, size, backend=name) for name in ("crew", "gloo"))
    assert ours == gloos
    assert all(of_rank == ours[0] for of_rank in ours)


def _refused(rank: int, size: int) -> list[str]:
    found = []
    vector = torch.ones(3).to_sparse()
    calls: list[Any] = [
        lambda: dist.all_reduce(vector, op=dist.ReduceOp.MAX),
        lambda: dist.all_reduce(torch.ones(3, dtype=torch.bool).to_sparse()),
        lambda: dist.all_reduce(torch.ones(3 + rank).to_sparse()),
        lambda: dist.all_reduce(torch.ones(3, dtype=(torch.float32, torch.int64)[rank]).to_sparse()),
        lambda: dist.all_reduce(vector if rank else torch.ones(3)),
    ]
    for call in calls:
        try:
            call()
        except (ValueError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    dist.all_reduce(vector)
    return [*found, str(vector.to_dense().tolist())]


def test_what_cannot_be_summed_up() -> None:
    """All ranks are told the same, and the group goes on."""
    one, other = results_of(_refused, 2)  # where no launcher compares what they call
    assert one == other
    maximum, truth, shapes, dtypes, layouts, total = one
    assert maximum == "ValueError: sparse tensors can only be summed up, but the reduction is MAX"
    assert truth.startswith("ValueError: torch cannot add sparse tensors of torch.bool")
    assert shapes.startswith(
        "CollectiveMismatch: ranks of one group sum up sparse tensors of different kinds:\n  rank 0:"
    )
    assert "rank 1: torch.float32, (4,), sparse in 1 of its dimensions" in shapes
    assert "rank 1: torch.int64, (3,), sparse in 1 of its dimensions" in dtypes
    assert "all_reduce_sparse" in layouts
    assert total == "[2.0, 2.0, 2.0]"


class Words(torch.nn.Module):
    """An embedding whose gradients are sparse, and a layer whose are not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 8, sparse=True)
        self.layer = torch.nn.Linear(8, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.layer(self.embedding(words).mean(1))


def _trained(rank: int, size: int) -> tuple[bool, list[list[float]]]:
    torch.manual_seed(3)
    model = DistributedDataParallel(Words())
    optimizers: list[Any] = [
        torch.optim.SparseAdam(model.module.embedding.parameters()),
        torch.optim.SGD(model.module.layer.parameters(), lr=0.1),
    ]
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        model.zero_grad()
        model(torch.randint(0, 50, (6, 5), generator=generator)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    gradient = model.module.embedding.weight.grad
    return gradient.is_sparse, [parameter.flatten().tolist() for parameter in model.parameters()]


def test_a_model_with_sparse_gradients() -> None:
    """`DistributedDataParallel`: weights as gloo's, and equal in all ranks."""
    ours, gloos = (run(_trained, 2, backend=name) for name in ("crew", "gloo"))
    assert ours == gloos
    assert ours[0] == ours[1]
    assert ours[0][0]
