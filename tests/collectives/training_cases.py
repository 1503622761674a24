"""The same training with `crew` and with gloo: what the weights are."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 20

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
    "small buckets": {"bucket_cap_mb": 0.01, "gradient_as_bucket_view": True},
}


class Net(nn.Module):
    """With buffers, and a part that some steps do without."""

    def __init__(self, has_unused: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 100))
        self.head, self.other = nn.Linear(100, 3), nn.Linear(100, 3)
        self.has_unused = has_unused

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        y: torch.Tensor = self.body(x)
        if self.has_unused:
            return self.head(y) if step % 2 else self.other(y)
        return self.head(y) + self.other(y)


def _batches(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(16, 20, generator=generator) for _ in range(STEPS)]


def _bits(tensors: Any) -> list[bytes]:
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


def data_parallel(rank: int, size: int) -> list[str]:
    """Settings of `DistributedDataParallel` with which the weights differ."""
    gloo, differences = dist.new_group(backend="gloo"), []
    for name, settings in SETTINGS.items():
        weights = []
        for group in (None, gloo):
            torch.manual_seed(0 if rank == 0 else 7)  # rank 0's weights are everybody's
            model = DistributedDataParallel(
                Net(name in ("unused parameters",)),
                process_group=group,
                **settings,  # type: ignore[arg-type]
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            for step, batch in enumerate(_batches(rank)):
                optimizer.zero_grad()
                model(batch, step).square().mean().backward()
                optimizer.step()
            weights.append(_bits(model.state_dict().values()))
        if weights[0] != weights[1]:
            differences.append(name)
    return differences


def without_synchronisation(rank: int, size: int) -> list[bool]:
    """Accumulated gradients, uneven inputs (`join`), and a communication hook."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    gloo, found = dist.new_group(backend="gloo"), []
    weights = []
    for group in (None, gloo):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(20, 5), process_group=group)
        model.register_comm_hook(group, fp16_compress_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with model.join():
            for batch in _batches(rank)[: 6 + 2 * rank]:
                with model.no_sync():
                    model(batch).square().mean().backward()
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        weights.append(_bits(model.parameters()))
    found.append(weights[0] == weights[1])
    return found


def sharded_optimizer(rank: int, size: int) -> bool:
    """`ZeroRedundancyOptimizer`."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    gloo, weights = dist.new_group(backend="gloo"), []
    for group in (None, gloo):
        torch.manual_seed(0)
        model = DistributedDataParallel(Net(False), process_group=group)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group, lr=0.01)
        for step, batch in enumerate(_batches(rank)):
            optimizer.zero_grad()
            model(batch, step).square().mean().backward()
            optimizer.step()
        weights.append(_bits(model.state_dict().values()))
    return weights[0] == weights[1]


def fully_sharded(rank: int, size: int) -> bool:
    """FSDP2's losses."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")
    gloo, losses = dist.new_group(backend="gloo"), []
    for group in (dist.group.WORLD, gloo):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 3))
        mesh = DeviceMesh.from_group(group, "cpu")
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        told = []
        for batch in _batches(rank):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            told.append(loss.item())
        losses.append(told)
    return losses[0] == losses[1] and losses[0][-1] < losses[0][0]
