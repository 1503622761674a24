"""`torch.multiprocessing.queue` with our queues in it."""

from __future__ import annotations

from typing import Any

import torch.multiprocessing.queue as _stock

from torchcrew.multiprocessing.queues import Queue, SimpleQueue

__all__ = ("Queue", "SimpleQueue")


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
