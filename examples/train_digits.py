"""Train a small CNN on scikit-learn's handwritten digits: plain PyTorch, nothing of torchcrew in it.

python examples/train_digits.py --epochs 2
torchcrew run examples/train_digits.py --epochs 2
"""

import argparse
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, random_split


class Digits(Dataset[tuple[Tensor, int]]):
    """1,797 images, each turned, shifted and blown up to (3, 128, 128) anew whenever it is read."""

    def __init__(self) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.images, dtype=torch.float32)[:, None, None] / 16
        self.labels = digits.target.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        theta = torch.eye(2, 3) + 0.1 * torch.randn(2, 3)
        grid = F.affine_grid(theta[None], [1, 1, 128, 128], align_corners=False)
        image = F.grid_sample(self.images[index], grid, align_corners=False)[0]
        colour = 0.5 + 0.5 * torch.rand(3, 1, 1)
        return image * colour + 0.1 * torch.randn(3, 128, 128), self.labels[index]


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.AvgPool2d(4),
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 8 * 8, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    torch.manual_seed(0)
    train_set, test_set = random_split(Digits(), [1437, 360])
    train = DataLoader(train_set, batch_size=64, shuffle=True, num_workers=options.workers)
    test = DataLoader(test_set, batch_size=120, num_workers=options.workers)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for epoch in range(options.epochs):
        started = time.perf_counter()
        for images, labels in train:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in test)
        seconds = time.perf_counter() - started
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}, test accuracy {right / len(test_set):.2%}, {seconds:.1f} s")


if __name__ == "__main__":
    main()
