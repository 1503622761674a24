"""One training run of the demo, in a process of its own: ``python -m torchcrew.cli.demo_train``.

    demo (parent)                                        this process
      spec (one JSON line) + digits (.npz) ── stdin ──►   trains, knows nothing of the other engine
      progress, memory sampling  ◄── stdout ── one JSON line per batch, the `result` as the last one

Every run starts in a fresh process, so that start-up, memory and speed of one engine never carry over to the other.
Training is deterministic: one thread, one seed. What is compared is therefore every loss, the accuracy and a hash of
the trained weights.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcrew.cli.demo_digits import ColouredDigits, DigitArrays

__all__ = ("RunResult", "RunSpec", "loader_class", "main", "make_model", "train")

BATCH_SIZE = 64
TEST_BATCH_SIZE = 120
LEARNING_RATE = 4e-3


@dataclass(frozen=True)
class RunSpec:
    """What to train, and with whose DataLoader."""

    engine: str
    """``stock`` or ``torchcrew``."""
    epochs: int
    workers: int
    seed: int


@dataclass(frozen=True)
class RunResult:
    """What one run took and what came out; seconds, ``*_at`` as of `time.monotonic`, which all processes share."""

    started_at: float
    ended_at: float
    train_s: float
    images: int
    wait_s: float
    """Time inside the loader: its start, every `next`, its end."""
    first_batch_s: list[float]
    """From ``iter(loader)`` to the first batch, for each epoch."""
    losses: list[float]
    loss_at: list[float]
    accuracy: float
    weights: str
    """SHA-256 of the trained weights."""
    iterator: str
    """The class that delivered the batches: which engine really ran."""


Tell = Callable[..., None]


class _Waiting:
    """Iterates over a loader and adds up the time spent in it."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self.first_batch_s: list[float] = []
        self.iterator = ""

    def batches(self, loader: Any) -> Iterator[Any]:
        started = time.perf_counter()
        iterator = iter(loader)
        self.iterator = f"{type(iterator).__module__}.{type(iterator).__qualname__}"
        first = True
        while True:
            batch = next(iterator, None)
            waited = time.perf_counter() - started
            self.total_s += waited
            if batch is None:
                return
            if first:
                self.first_batch_s.append(waited)
                first = False
            yield batch
            del batch
            started = time.perf_counter()


def make_model() -> nn.Module:
    """A CNN that is quick on one core: it looks at the images at a quarter of their size."""
    return nn.Sequential(
        nn.AvgPool2d(4),
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )


def loader_class(engine: str) -> Any:
    """The DataLoader of an engine: the one line in which the runs differ."""
    return import_module({"stock": "torch.utils.data", "torchcrew": "torchcrew.data"}[engine]).DataLoader


def train(spec: RunSpec, arrays: DigitArrays, tell: Tell) -> RunResult:
    """Train and test once; ``tell`` is called with ``event=…`` for every batch."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(spec.seed)
    loader_type = loader_class(spec.engine)
    loader = loader_type(
        ColouredDigits(arrays, train=True),
        batch_size=BATCH_SIZE,
        shuffle=True,
        drop_last=True,
        num_workers=spec.workers,
    )
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    steps = spec.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    waiting, losses, loss_at = _Waiting(), [], []
    tell(event="start", steps=steps)
    started_at = time.monotonic()
    for _ in range(spec.epochs):
        for images, labels in waiting.batches(loader):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            loss_at.append(time.monotonic())
            tell(event="batch", done=len(losses), loss=losses[-1], waited=waiting.total_s)
    ended_at = time.monotonic()
    test = loader_type(ColouredDigits(arrays, train=False), batch_size=TEST_BATCH_SIZE, num_workers=spec.workers)
    return RunResult(
        started_at=started_at,
        ended_at=ended_at,
        train_s=ended_at - started_at,
        images=len(losses) * BATCH_SIZE,
        wait_s=waiting.total_s,
        first_batch_s=waiting.first_batch_s,
        losses=losses,
        loss_at=loss_at,
        accuracy=_accuracy(model, test),
        weights=_hash(model),
        iterator=waiting.iterator,
    )


def _accuracy(model: nn.Module, loader: Any) -> float:
    model.eval()
    right = total = 0
    with torch.no_grad():
        for images, labels in loader:
            answer: Tensor = model(images).argmax(1)
            right += int((answer == labels).sum())
            total += len(labels)
    return right / total


def _hash(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    """Read a spec and the digits from stdin, train, and write events to stdout."""
    spec = RunSpec(**json.loads(sys.stdin.buffer.readline()))
    arrays = DigitArrays.from_bytes(sys.stdin.buffer.read())

    def tell(**event: Any) -> None:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()

    tell(event="result", **asdict(train(spec, arrays, tell)))


if __name__ == "__main__":
    main()
