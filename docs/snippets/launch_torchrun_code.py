"""Code that was written for torchrun, called as it is: it makes its process group itself, by the environment."""

import os

import torch
import torch.distributed as dist

import torchcrew


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), int(os.environ["WORLD_SIZE"])
    values = torch.tensor([rank])
    dist.all_reduce(values)
    print(f"rank {rank} of {world_size}: {values.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    torchcrew.launch(main, nprocs=2, logs="prefix")
