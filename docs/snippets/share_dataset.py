"""A big list in a dataset: one copy for all workers, however they start."""

from torch.utils.data import Dataset

import torchcrew
from torchcrew.data import DataLoader


class Annotations(Dataset):
    def __init__(self, items):
        self.items = torchcrew.share(items)  # was: self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        item = self.items[index]  # decoded now, and yours
        return item["id"], len(item["caption"])


if __name__ == "__main__":
    items = [{"id": i, "caption": "word " * (i % 7)} for i in range(50_000)]
    dataset = Annotations(items)
    assert dataset.items[-1] == items[-1]

    loader = DataLoader(dataset, batch_size=500, shuffle=True, num_workers=2, multiprocessing_context="zygote")
    ids = sorted(int(i) for batch, lengths in loader for i in batch)
    assert ids == list(range(50_000))
    print(dataset.items, "read by two workers, none of which has a copy")
