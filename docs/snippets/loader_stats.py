"""Who waits for whom: the numbers of every loader with workers."""

import time

import torch
from torch.utils.data import TensorDataset

from torchcrew.data import DataLoader, loader_stats

if __name__ == "__main__":
    for _ in DataLoader(TensorDataset(torch.rand(64, 3, 64, 64)), batch_size=8, num_workers=2):
        time.sleep(0.01)  # the training step

    (stats,) = loader_stats()
    assert stats.batches == 8
    print(f"{stats.batches} batches; the loop waited {stats.wait_s:.3f} s, the workers idled {stats.idle_s:.3f} s")
