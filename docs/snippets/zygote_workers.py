"""Workers that see what spawned workers see, and start in milliseconds."""

import time

import torch
from torch.utils.data import TensorDataset

from torchcrew.data import DataLoader

if __name__ == "__main__":
    data = TensorDataset(torch.arange(1_000))
    for attempt in ("cold", "warm"):
        began = time.perf_counter()
        loader = DataLoader(data, batch_size=100, num_workers=2, multiprocessing_context="zygote")
        (first,) = next(iter(loader))
        print(f"{attempt}: first batch after {time.perf_counter() - began:.3f} s")
        assert first.tolist() == list(range(100))
