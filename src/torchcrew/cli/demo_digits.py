"""The demo's data: scikit-learn's handwritten digits, drawn anew in colour for every sample.

1,797 real images of 8x8 pixels become (3, 128, 128) float32 samples: bent, turned, blown up, noisy, in random colours.
A sample is 197 kB made in about a third of a millisecond, a batch of 64 is 12.6 MB: making and carrying both matter.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ("SIDE", "ColouredDigits", "DigitArrays", "load_digit_arrays")

SIDE = 128
"""Pixels of a sample's side."""
HELD_OUT = 360
"""Images kept for the test, a fifth of all; which ones is fixed by `SPLIT_SEED`."""
SPLIT_SEED = 0
MAX_TURN = 0.30
"""Radians."""
MAX_SHIFT = 0.12
"""In units of half the image."""
BEND = 0.05
"""Standard deviation of the elastic displacement, in units of half the image."""
NOISE = 0.10


@dataclass(frozen=True)
class DigitArrays:
    """All images and labels, small enough to be handed to another process as bytes."""

    images: np.ndarray
    """(1797, 8, 8) float32, 0 to 1."""
    labels: np.ndarray
    """(1797,) int64."""

    def to_bytes(self) -> bytes:
        buffer = io.BytesIO()
        np.savez(buffer, images=self.images, labels=self.labels)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> DigitArrays:
        with np.load(io.BytesIO(data)) as arrays:
            return cls(arrays["images"], arrays["labels"])


def load_digit_arrays() -> DigitArrays:
    """Read the images out of scikit-learn's wheel.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    return DigitArrays((digits.images / 16.0).astype(np.float32), digits.target.astype(np.int64))


class ColouredDigits(Dataset[tuple[Tensor, int]]):
    """Digits as (3, SIDE, SIDE) float32 images; the training ones are different at every access.

    All random numbers come from torch's generator of the process that asks, so that two loaders with the same seed and
    the same number of workers give the same batches.
    """

    def __init__(self, arrays: DigitArrays, *, train: bool) -> None:
        order = np.random.RandomState(SPLIT_SEED).permutation(len(arrays.labels))
        chosen = order[HELD_OUT:] if train else order[:HELD_OUT]
        self.images = torch.from_numpy(arrays.images[chosen])
        self.labels = arrays.labels[chosen].tolist()
        self.train = train

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index][None, None]
        return (_draw(image) if self.train else _draw_plainly(image)), self.labels[index]


def _draw(image: Tensor) -> Tensor:
    """(1, 1, 8, 8) to (3, SIDE, SIDE), differently each time."""
    turn, zoom, shear, shift_x, shift_y = (2 * torch.rand(5) - 1).tolist()
    turn, zoom = MAX_TURN * turn, 1 + 0.15 * zoom
    cosine, sine = zoom * math.cos(turn), zoom * math.sin(turn)
    theta = torch.tensor([[cosine, sine], [0.2 * shear - sine, cosine], [MAX_SHIFT * shift_x, MAX_SHIFT * shift_y]])
    grid = (_coordinates() @ theta).view(1, SIDE, SIDE, 2)  # affine_grid does the same and takes five times as long
    bend = F.interpolate(BEND * torch.randn(1, 2, 5, 5), size=(SIDE, SIDE), mode="bilinear", align_corners=True)
    ink = F.grid_sample(image, grid + bend.permute(0, 2, 3, 1), align_corners=False)[0]
    ink = ink.add_(torch.randn(1, SIDE, SIDE), alpha=NOISE).clamp_(0, 1)
    paper_colour, ink_colour = 0.5 * torch.rand(3, 1, 1), 0.5 + 0.5 * torch.rand(3, 1, 1)
    return torch.lerp(paper_colour, ink_colour, ink)


@cache
def _coordinates() -> Tensor:
    """(SIDE * SIDE, 3): x, y and 1 of every pixel's centre, the image reaching from -1 to 1."""
    line = (2 * torch.arange(SIDE, dtype=torch.float32) + 1) / SIDE - 1
    y, x = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([x.flatten(), y.flatten(), torch.ones(SIDE * SIDE)], dim=1)


def _draw_plainly(image: Tensor) -> Tensor:
    """(1, 1, 8, 8) to (3, SIDE, SIDE), grey and upright: what the test shows."""
    ink = F.interpolate(image, size=(SIDE, SIDE), mode="bilinear", align_corners=False)[0]
    return torch.lerp(torch.full((3, 1, 1), 0.25), torch.full((3, 1, 1), 0.75), ink)
