"""A collate function of your own: lists of tensors of any length travel as one message."""

import torch
from torch.utils.data import Dataset

from torchcrew.data import DataLoader


class Sentences(Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, index):
        return torch.arange(index % 50 + 1)


def keep_lengths(samples):
    return {"tokens": samples, "lengths": torch.tensor([len(sample) for sample in samples])}


if __name__ == "__main__":
    loader = DataLoader(Sentences(), batch_size=64, num_workers=2, collate_fn=keep_lengths)
    for batch in loader:
        assert [len(tokens) for tokens in batch["tokens"]] == batch["lengths"].tolist()
    print("64 ragged tensors a batch, one message each")
