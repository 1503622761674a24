"""A budget for shared memory: a slow loop makes the workers wait, holding everything is an error that helps."""

import torch
from torch.utils.data import TensorDataset

from torchcrew.data import DataLoader
from torchcrew.errors import ArenaFull

if __name__ == "__main__":
    data = TensorDataset(torch.rand(400, 3, 64, 64))
    loader = DataLoader(data, batch_size=20, num_workers=2, memory_budget="12MB")

    seen = sum(len(batch) for (batch,) in loader)  # each batch is dropped before the next: runs in 12 MB
    assert seen == 400

    held = []
    try:
        for (batch,) in loader:
            held += [batch]  # 20 MB in all
    except ArenaFull as error:
        print(str(error).splitlines()[-1])
    else:
        raise AssertionError("20 MB fitted in 12 MB")
