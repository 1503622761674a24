"""Four ranks with a process group: no address, no port, and the first failure of any is an error here."""

import torch
import torch.distributed as dist

import torchcrew
import torchcrew.multiprocessing as mp


def run(rank, world_size):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    total = torch.ones(3, device=torchcrew.device()) * rank
    dist.all_reduce(total)
    if rank == 0:
        print(total)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, args=(4,), nprocs=4)
