"""Efficient multiprocessing for PyTorch: data loading, training and inference in many processes of one machine.

Importing this package starts nothing, patches nothing, sets no environment variable and does not import torch: the
public submodules are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    from torchcrew import data as data
    from torchcrew import errors as errors
    from torchcrew import memory as memory

__all__ = ("__version__", "data", "errors", "memory")

__version__ = "0.1.0"

_SUBMODULES = frozenset({"data", "errors", "memory", "testing"})


def __getattr__(name: str) -> "ModuleType":
    """Import a public submodule at its first use."""
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
