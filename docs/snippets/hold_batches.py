"""Batches are yours: hold them, cut views out of them, write into them, for as long as you like."""

import torch
from torch.utils.data import TensorDataset

from torchcrew.data import DataLoader

if __name__ == "__main__":
    data = torch.rand(512, 3, 64, 64)
    loader = DataLoader(TensorDataset(data), batch_size=16, num_workers=2)

    batches = [batch for (batch,) in loader]  # a whole epoch, 25 MB, while the workers went on
    assert torch.equal(torch.cat(batches), data)

    corner = batches[7][0, :, :2, :2]  # a view of a view ...
    expected = data[112, :, :2, :2].clone()
    del batches, loader
    assert torch.equal(corner, expected)  # ... outlives its batch, its loader and its worker
    corner.zero_()
    print("still mine:", corner.sum().item())
