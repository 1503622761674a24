"""All ranks start anew after a failure, and go on from what rank 0 has saved."""

import logging
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import torchcrew


def train(checkpoint, steps):
    first, total = 0, torch.zeros(())
    if checkpoint.exists():
        first, total = torch.load(checkpoint)
    for step in range(first, steps):
        if step == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and torchcrew.rank() == 1:
            raise OSError("the disk is away")
        dist.barrier()  # stands for a step of the training
        total += 1
        if torchcrew.rank() == 0:
            torch.save((step + 1, total), checkpoint.with_suffix(".draft"))
            os.replace(checkpoint.with_suffix(".draft"), checkpoint)  # whoever reads it finds a whole one
    return first, total.item()


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    with tempfile.TemporaryDirectory() as folder:
        print(torchcrew.launch(train, Path(folder) / "checkpoint.pt", 6, nprocs=2, restarts=1))
