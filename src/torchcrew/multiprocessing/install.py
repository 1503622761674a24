"""Puts this package under `torch.multiprocessing`'s own name, and takes it away again.

The module objects stay; names in them are bound anew. So everybody who says ``torch.multiprocessing.Queue`` when it is
used gets ours, torch's own code included; who has imported the name itself before keeps what was imported.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import torch.multiprocessing

import torchcrew.multiprocessing

__all__ = ("install", "is_installed", "uninstall")

#: Submodules whose functions and classes are replaced; "" is the package. ``torch.multiprocessing.spawn`` is the
#: function, so modules are asked for by their names.
_MODULES = ("", ".spawn", ".pool", ".queue")

#: What was there before, by module; empty while nothing is installed.
_replaced: dict[ModuleType, dict[str, Any]] = {}


def install() -> None:
    """Have `torch.multiprocessing` of this process be ours. Forked children inherit it. Idempotent.

    Objects that exist stay what they are. The names that this package adds are not put there.
    """
    if _replaced:
        return
    for stock, ours in [_pair(suffix) for suffix in _MODULES]:  # all or nothing is imported before anything changes
        names = [name for name in ours.__all__ if name in vars(stock)]
        _replaced[stock] = {name: vars(stock)[name] for name in names}
        vars(stock).update({name: getattr(ours, name) for name in names})


def uninstall() -> None:
    """Give `torch.multiprocessing` its own names back. Idempotent."""
    while _replaced:
        stock, names = _replaced.popitem()
        vars(stock).update(names)


def is_installed() -> bool:
    """Whether `install` was called last."""
    return bool(_replaced)


def _pair(suffix: str) -> tuple[ModuleType, ModuleType]:
    names = [package.__name__ + suffix for package in (torch.multiprocessing, torchcrew.multiprocessing)]
    for name in names:
        import_module(name)
    stock, ours = (sys.modules[name] for name in names)
    return stock, ours
