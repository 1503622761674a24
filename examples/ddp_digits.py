"""Train a small CNN on scikit-learn's handwritten digits in several ranks: `DistributedDataParallel`, on CPU or GPUs.

python examples/ddp_digits.py --nproc 2 --epochs 3
torchcrew launch -n 2 examples/ddp_digits.py --epochs 3
torchrun --nproc-per-node 2 examples/ddp_digits.py --epochs 3
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import torchcrew

#: Images to learn from; the other 388 are the test. Rank 0 of 2 or 4 has one batch more than the others.
TRAIN = 1409
BATCH = 16


class EachOnce(DistributedSampler[Any]):
    """Share a data set out among the ranks without stock's padding: the last ranks may get one sample less."""

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(super().__iter__(), len(self))

    def __len__(self) -> int:
        return len(range(self.rank, len(self.dataset), self.num_replicas))


@dataclass
class Trained:
    """What each rank returns."""

    batches: int
    """Of this rank, in an epoch."""
    losses: dict[int, float]
    """This rank's mean of each epoch of this run."""
    accuracy: float
    weights: Tensor


def data() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:TRAIN], order[TRAIN:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def train(epochs: int, checkpoint: Path | None = None, resume: bool = False, terminal: bool = False) -> Trained:
    """Run in every rank."""
    device = torchcrew.device()
    torch.manual_seed(0)
    train_set, test_set = data()
    sampler = EachOnce(train_set, seed=0, drop_last=False)
    loader = DataLoader(train_set, BATCH, sampler=sampler)
    model = DistributedDataParallel(make_model().to(device), [device] if device.type == "cuda" else None)
    # Without momentum: the state of a rank that has ended its epoch early would lag behind, `Join` equals weights only.
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    first = load(checkpoint, model, optimizer, device) if checkpoint is not None and resume else 0
    screen = Console(stderr=True, force_terminal=terminal or None)
    losses = {}
    for epoch in range(first, epochs):
        sampler.set_epoch(epoch)  # another order
        total = torch.zeros((), device=device)
        with Join([model]):  # who has no batch left takes part in what the others still have to exchange
            for images, labels in track(loader, f"epoch {epoch + 1}", console=screen, disable=torchcrew.rank() > 0):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images.to(device)), labels.to(device))
                loss.backward()
                optimizer.step()
                total += loss.detach()
        losses[epoch + 1] = float(total) / len(loader)
        if checkpoint is not None:
            save(checkpoint, model, optimizer, epoch + 1)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return Trained(len(loader), losses, accuracy(model, test_set, device), weights.cpu())


def save(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    """Have one rank write what all have; whoever reads the file finds a whole one."""
    if torchcrew.rank() == 0:
        draft = checkpoint.with_suffix(".draft")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epochs}, draft)
        os.replace(draft, checkpoint)
    dist.barrier()


def load(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Return how many epochs the checkpoint has behind it."""
    state = torch.load(checkpoint, map_location=device, weights_only=True)  # not to the GPU of the rank that wrote it
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["epochs"])


@torch.no_grad()
def accuracy(model: DistributedDataParallel, test_set: TensorDataset, device: torch.device) -> float:
    """Share the test out, too, and add up who got how many right."""
    right = torch.zeros((), device=device)
    for images, labels in DataLoader(test_set, 128, sampler=EachOnce(test_set, shuffle=False)):
        right += (model.module(images.to(device)).argmax(1) == labels.to(device)).sum()
    dist.all_reduce(right)
    return float(right) / len(test_set)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc", type=int, help="ranks; by default one for each GPU, or each core")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint", type=Path, help="file that is written after each epoch")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    options = parser.parse_args()
    ranks = torchcrew.launch(
        train,
        options.epochs,
        options.checkpoint,
        options.resume,
        sys.stderr.isatty(),
        nprocs=options.nproc or "auto",
    )
    if torchcrew.rank() == 0:  # where another launcher has started the ranks, each of them is here
        for epoch in ranks[0].losses:
            print(f"epoch {epoch}: loss by rank", *(f"{rank.losses[epoch]:.3f}" for rank in ranks))
        print("batches by rank:", *(rank.batches for rank in ranks))
        print("all ranks agree:", all(torch.equal(rank.weights, ranks[0].weights) for rank in ranks))
        print(f"test accuracy: {ranks[0].accuracy:.2%}")


if __name__ == "__main__":
    main()
