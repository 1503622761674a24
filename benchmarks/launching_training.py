"""The training of `benchmarks.launching`: the tutorial's `DistributedDataParallel`, in whatever ranks call it.

In a module of its own, because the zygote imports more for a program whose text shows that it trains.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EPOCHS, SIZE = 40, 100


def train(rank: int, world_size: int, path: str) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(SIZE, 10, generator=generator)
    target = data @ torch.ones(10, 1)
    model = DistributedDataParallel(nn.Linear(10, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    mine = slice(rank, None, world_size)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(data[mine]), target[mine])
        loss.backward()
        optimizer.step()
    dist.all_reduce(loss)
    if rank == 0:
        Path(path).write_text(repr(loss.item() / world_size))
