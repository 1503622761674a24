"""One rank does not come to a collective: with a timeout the job ends, and says which one and where it is."""

import time

import torch
import torch.distributed as dist

import torchcrew


def train(steps):
    for step in range(steps):
        if step == 2 and torchcrew.rank() == 1:
            time.sleep(60)  # stands for a disk that does not answer
        dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    try:
        torchcrew.launch(train, 10, nprocs=2, timeout=0.5)
    except torchcrew.errors.RanksStuck as error:
        print(str(error).partition("\n\n")[0])  # what follows are the stacks
