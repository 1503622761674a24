"""As programs for torchrun are written: two steps of data-parallel training; rank 0 prints what came out."""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    assert rank == local_rank == int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(arguments.steps):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(rank + step))).square().mean().backward()
        optimizer.step()
    weights = torch.cat([parameter.flatten() for parameter in model.parameters()])
    if rank == 0:
        shown = " ".join(f"{weight:.5f}" for weight in weights.tolist())
        sys.stdout.write(f"{dist.get_world_size()} {os.environ['LOCAL_WORLD_SIZE']}: {shown}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
