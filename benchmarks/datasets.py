"""The datasets of the benchmarks: importable, so that spawned workers find them, and the same in every process.

What is not the loader's work is kept out: samples exist before the first batch is asked for.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils.data import Dataset

__all__ = ("Images", "Ints", "ManyTensors", "Ragged", "Sleepy")

#: Different images in a dataset of any length. Odd, so that no two neighbouring batches are the same, and few, so that
#: reading them is not what is measured.
DISTINCT_IMAGES = 7
#: The same for dicts of tensors: a prime above the batch size.
DISTINCT_DICTS = 127


class Ints(Dataset[int]):
    """``dataset[i]`` is ``i``: nothing but overhead."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


class Images(Dataset[Any]):
    """(image, index) with images (3, 224, 224), as tensors or numpy arrays."""

    def __init__(self, length: int, dtype: torch.dtype, *, as_numpy: bool = False) -> None:
        generator = torch.Generator().manual_seed(7)
        shape = (DISTINCT_IMAGES, 3, 224, 224)
        if dtype.is_floating_point:
            images = torch.rand(shape, generator=generator, dtype=dtype)
        else:
            images = torch.randint(0, 256, shape, generator=generator, dtype=dtype)
        self._length = length
        self._images: list[Any] = [image.numpy().copy() if as_numpy else image.clone() for image in images]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._images[index % DISTINCT_IMAGES], index


class ManyTensors(Dataset[dict[str, torch.Tensor]]):
    """Dicts of many small tensors (16,) float32 that exist beforehand."""

    def __init__(self, length: int, tensors: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self._length = length
        self._dicts = [
            {f"field_{k}": torch.rand(16, generator=generator) for k in range(tensors)} for _ in range(DISTINCT_DICTS)
        ]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._dicts[index % DISTINCT_DICTS]


class Ragged(Dataset[torch.Tensor]):
    """Tensors (n,) float32 that exist beforehand, n between 64 and 2,047; to be collated by ``list``."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(7)
        sizes = torch.randint(64, 2048, (length,), generator=generator).tolist()
        self._samples = [torch.rand(size, generator=generator) for size in sizes]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._samples[index]


class Sleepy(Dataset[torch.Tensor]):
    """64 KB samples, each of which takes a while that costs no CPU, as a remote read does."""

    def __init__(self, length: int, seconds: float) -> None:
        self._length = length
        self._seconds = seconds

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._seconds)
        return torch.full((16_384,), float(index))
