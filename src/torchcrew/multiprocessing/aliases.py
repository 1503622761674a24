"""Submodules under their stock names: what this package has no file for is torch's module, or the standard library's.

``import torchcrew.multiprocessing.managers`` gives `multiprocessing.managers` itself, not a copy of it: its classes
and its state are the ones that everybody else has.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType

__all__ = ("add", "is_submodule")

_PACKAGE = __package__
_SOURCES = ("torch.multiprocessing", "multiprocessing")


class _Loader(Loader):
    """Makes a name stand for another module."""

    def __init__(self, source: str) -> None:
        self.source = source

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # The import system goes on with what it finds under the name. Returning the module from `create_module`
        # would have its `__spec__` overwritten.
        sys.modules[module.__name__] = importlib.import_module(self.source)


class _Finder:
    """Finds the names below this package that have no file here."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(f"{_PACKAGE}."):
            return None
        rest = name.removeprefix(f"{_PACKAGE}.")
        if "." not in rest and PathFinder.find_spec(name, path) is not None:
            return None
        for source in _SOURCES:
            try:
                found = find_spec(f"{source}.{rest}")
            except ModuleNotFoundError:
                continue
            if found is not None:
                return ModuleSpec(name, _Loader(found.name))
        return None


def add() -> None:
    """Have such names found. First of all finders: below an alias, others would load a second copy."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def is_submodule(name: str) -> bool:
    """Whether this package has a submodule of that name, here or by an alias."""
    return not name.startswith("__") and find_spec(f"{_PACKAGE}.{name}") is not None
