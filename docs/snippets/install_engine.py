"""Loaders that other code makes: put the engine under every stock DataLoader of the process."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import torchcrew.data

if __name__ == "__main__":
    loader = DataLoader(TensorDataset(torch.arange(100)), batch_size=10, num_workers=2)  # stock's class, untouched

    torchcrew.data.install()
    total = sum(int(batch.sum()) for (batch,) in loader)  # runs on torchcrew's engine
    torchcrew.data.uninstall()

    assert total == 4950
    print(torchcrew.data.loader_stats()[0].batches, "batches came through torchcrew")
