"""Efficient multiprocessing for PyTorch: data loading, training and inference in many processes of one machine.

Importing this package starts nothing, patches nothing, sets no environment variable and does not import torch: the
public submodules are imported when they are first used. Where `torch.distributed` is there already, it learns the name
of the backend `crew`, by the function that it has for this; else the entry point of this package tells it.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from torchcrew import data as data
    from torchcrew import errors as errors
    from torchcrew import memory as memory
    from torchcrew import multiprocessing as multiprocessing
    from torchcrew.channel.pipe import Pipe as Pipe
    from torchcrew.channel.queue import Queue as Queue
    from torchcrew.channel.shared import share as share
    from torchcrew.channel.shared_sequences import SharedDict as SharedDict
    from torchcrew.channel.shared_sequences import SharedList as SharedList
    from torchcrew.launcher.crew import Crew as Crew
    from torchcrew.launcher.device import device as device
    from torchcrew.launcher.identity import local_rank as local_rank
    from torchcrew.launcher.identity import rank as rank
    from torchcrew.launcher.identity import world_size as world_size
    from torchcrew.launcher.launching import launch as launch

__all__ = (
    "Crew",
    "Pipe",
    "Queue",
    "SharedDict",
    "SharedList",
    "__version__",
    "data",
    "device",
    "errors",
    "launch",
    "local_rank",
    "memory",
    "multiprocessing",
    "rank",
    "share",
    "world_size",
)

__version__ = "0.1.0"

_SUBMODULES = frozenset({"data", "errors", "memory", "multiprocessing", "testing"})
#: Functions and classes, by the module that has them.
_ATTRIBUTES = {
    "Crew": "torchcrew.launcher.crew",
    "Pipe": "torchcrew.channel.pipe",
    "Queue": "torchcrew.channel.queue",
    "SharedDict": "torchcrew.channel.shared_sequences",
    "SharedList": "torchcrew.channel.shared_sequences",
    "device": "torchcrew.launcher.device",
    "launch": "torchcrew.launcher.launching",
    "local_rank": "torchcrew.launcher.identity",
    "rank": "torchcrew.launcher.identity",
    "share": "torchcrew.channel.shared",
    "world_size": "torchcrew.launcher.identity",
}

if "torch.distributed.distributed_c10d" in sys.modules:
    from torchcrew.collectives.registration import register as _register

    _register()


def __getattr__(name: str) -> "Any":
    """Import a public submodule, or what a module of its own has, at its first use."""
    if name in _ATTRIBUTES:
        return getattr(import_module(_ATTRIBUTES[name]), name)
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
