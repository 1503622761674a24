"""A training loop with workers: the one line that changes is the import."""

import torch
from torch.utils.data import Dataset

from torchcrew.data import DataLoader  # was: from torch.utils.data import DataLoader


class Squares(Dataset):
    def __len__(self):
        return 1_000

    def __getitem__(self, index):
        image = torch.full((3, 64, 64), float(index))
        return image, index**2


if __name__ == "__main__":
    loader = DataLoader(Squares(), batch_size=32, shuffle=True, num_workers=2)
    for images, squares in loader:
        assert images.shape[1:] == (3, 64, 64)
        assert torch.equal(images[:, 0, 0, 0].long() ** 2, squares)
    print("saw", len(loader), "batches")
