"""A loader whose workers are spawned: they import this script again, and find its classes."""

import os
import sys

import torch
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor(index * index), os.getpid()


if __name__ == "__main__":
    loader = DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context="spawn")
    numbers, pids = zip(*loader, strict=True)
    assert os.getpid() not in torch.cat(pids).tolist()
    sys.stdout.write(f"{torch.cat(numbers).tolist()}\n")
