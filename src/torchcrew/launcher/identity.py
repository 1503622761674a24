"""Who a rank is: its number, its number on this machine, and how many there are."""

from __future__ import annotations

import os
import sys
from typing import Any

from torchcrew.crew import rank as ranks

__all__ = ("local_rank", "number", "rank", "world_size")


def rank() -> int:
    """Return the number of this process among all ranks of its job, from 0 on.

    It is, in this order:

    - the environment variable ``RANK``, which `torchcrew.launch` and `torchrun` set;
    - the rank in `torch.distributed`'s default process group, where there is one;
    - the number that `torchcrew.multiprocessing.spawn` gave to this process;
    - 0.

    Raises:
        ValueError: ``RANK`` is set and is no number from 0 on.
    """
    given = number("RANK")
    if given is not None:
        return given
    group = _distributed()
    if group is not None:
        return int(group.get_rank())
    own = ranks.current()
    return own.index if own is not None else 0


def local_rank() -> int:
    """Return the number of this process among those of this machine, from 0 on.

    It is, in this order:

    - the environment variable ``LOCAL_RANK``, which `torchcrew.launch` and `torchrun` set;
    - the number that `torchcrew.multiprocessing.spawn` gave to this process;
    - 0.

    Raises:
        ValueError: ``LOCAL_RANK`` is set and is no number from 0 on.
    """
    given = number("LOCAL_RANK")
    if given is not None:
        return given
    own = ranks.current()
    return own.index if own is not None else 0


def world_size() -> int:
    """Return how many ranks this job has; 1 outside of any.

    It is, in this order:

    - the environment variable ``WORLD_SIZE``, which `torchcrew.launch` and `torchrun` set;
    - the size of `torch.distributed`'s default process group, where there is one;
    - how many processes `torchcrew.multiprocessing.spawn` started;
    - 1.

    Raises:
        ValueError: ``WORLD_SIZE`` is set and is no number from 1 on.
    """
    given = number("WORLD_SIZE", least=1)
    if given is not None:
        return given
    group = _distributed()
    if group is not None:
        return int(group.get_world_size())
    own = ranks.current()
    return own.count if own is not None else 1


def number(name: str, least: int = 0) -> int | None:
    """What an environment variable says; None where it is empty or not set.

    Raises:
        ValueError: it is no whole number, or a smaller one than ``least``.
    """
    text = os.environ.get(name)
    if not text:
        return None
    if not text.strip().isdecimal() or int(text) < least:
        raise ValueError(f"the environment variable {name} should be a number from {least} on, but is {text!r}")
    return int(text)


def _distributed() -> Any:
    """`torch.distributed` where it has a process group. It is not imported: then there is none."""
    module: Any = sys.modules.get("torch.distributed")
    is_initialized = getattr(module, "is_initialized", None)  # a build without it has no such function
    return module if is_initialized is not None and is_initialized() else None
