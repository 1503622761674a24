"""The same training by `torchcrew.launch` and by stock's `mp.spawn`; prints the bits of both ends."""

from __future__ import annotations

import hashlib
import json
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import torchcrew


def train() -> list[str]:
    """Three epochs; returns the losses and a digest of the weights."""
    torch.manual_seed(dist.get_rank())
    torch.set_num_threads(1)
    inputs = torch.linspace(-1, 1, 64 * 8).reshape(64, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=1)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
    )
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch, wanted in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch), wanted)
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return [*losses, hashlib.sha256(weights).hexdigest()]


def stocks(rank: int, size: int, folder: str) -> None:
    """One rank of stock's."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    with open(f"{folder}/{rank}", "w") as file:
        json.dump(train(), file)
    dist.destroy_process_group()


def by_stock(size: int) -> list[list[str]]:
    """By `torch.multiprocessing.spawn`."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(stocks, (size, folder), nprocs=size)
        found = []
        for rank in range(size):
            with open(f"{folder}/{rank}") as file:
                found.append(json.load(file))
        return found


if __name__ == "__main__":
    print(json.dumps([torchcrew.launch(train, nprocs=2), by_stock(2)]))
