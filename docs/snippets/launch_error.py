"""Rank 1 raises while rank 0 waits for it: its error is raised here, at once, and no rank is left."""

import torch
import torch.distributed as dist

import torchcrew


def add_up(counts):
    mine = counts[torchcrew.rank()]
    total = torch.tensor(mine)
    dist.all_reduce(total)
    return total.item()


if __name__ == "__main__":
    try:
        torchcrew.launch(add_up, {0: 17}, nprocs=2)
    except KeyError as error:
        failed = error.__cause__
        print(f"{type(error).__name__}: {error}, of rank {failed.rank}\n\n{failed}")
