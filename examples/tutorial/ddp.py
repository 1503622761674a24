"""DistributedDataParallel over gloo: no address, no port, no environment variable to set."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchcrew
import torchcrew.multiprocessing as mp


def train(rank: int, world_size: int, data: torch.Tensor, target: torch.Tensor, epochs: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    device = torchcrew.device()  # the rank's GPU, or the CPU on a machine without one
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(10, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    mine = slice(rank, None, world_size)
    x, y = data[mine].to(device), target[mine].to(device)
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    weights = [torch.empty_like(model.module.weight) for _ in range(world_size)]
    dist.all_gather(weights, model.module.weight.detach())
    if rank == 0:
        print("all ranks agree:", all(torch.equal(weights[0], other) for other in weights), flush=True)
        print(f"loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    world_size, epochs = 4, 40
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(100, 10, generator=generator)
    target = data @ torch.ones(10, 1)
    mp.spawn(train, args=(world_size, data, target, epochs), nprocs=world_size, join=True)


if __name__ == "__main__":
    main()
