"""In every process of a test suite: let the suite's own import of a module give another one.

    PYTHONPATH=tools/swap PEER_SWAP="CONSUMER:MODULE=REPLACEMENT" python -m pytest --assert=plain ...

Python imports this file at the start of each process that inherits the two variables, so that children which import
the suite's file anew get the same. While the module CONSUMER is executed, and only then, MODULE is a stand-in:
REPLACEMENT's object for each public name (a missing one is an error), MODULE itself for the rest, its submodules and
private names. It is as if the import line in the suite had been edited. All others,
REPLACEMENT included, see the true MODULE, and a process that never imports CONSUMER pays nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.util
import os
import sys
import types
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec


class Overlay(types.ModuleType):
    """A module with the public names of ``above`` and, for the rest, ``below``."""

    def __init__(self, below: types.ModuleType, above: types.ModuleType) -> None:
        super().__init__(below.__name__, below.__doc__)
        # Not __all__, which torch's module leaves half of its public names out of.
        public = {name for name, value in vars(below).items() if name[0] != "_" and type(value) is not types.ModuleType}
        names = {name: getattr(above, name) for name in public}
        self.__dict__.update(names, __spec__=below.__spec__, _below=below)

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["_below"], name)

    def __setattr__(self, name: str, value: object) -> None:
        # The import system binds a submodule to its parent; nobody else shall miss it there.
        setattr(self.__dict__["_below"], name, value)


@contextlib.contextmanager
def replaced(name: str, stand_in: types.ModuleType) -> Iterator[None]:
    """``import name`` gives ``stand_in`` inside; ``import a.b as c`` reads the parent's attribute, so that too."""
    true = sys.modules[name]
    parent, _, leaf = name.rpartition(".")
    sys.modules[name] = stand_in
    if parent:
        setattr(sys.modules[parent], leaf, stand_in)
    try:
        yield
    finally:
        sys.modules[name] = true
        if parent:
            setattr(sys.modules[parent], leaf, true)


class Finder(importlib.abc.MetaPathFinder):
    """Executes one module, found by the others, with another module replaced."""

    def __init__(self, consumer: str, module: str, replacement: str) -> None:
        self.consumer, self.module, self.replacement = consumer, module, replacement
        self.searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the consumer as if this finder were not there, then wrap its execution."""
        if name != self.consumer or self.searching:
            return None
        self.searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.searching = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            above = importlib.import_module(self.replacement)
            below = importlib.import_module(self.module)
            with replaced(self.module, Overlay(below, above)):
                execute(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if rule := os.environ.get("PEER_SWAP"):
    _consumer, _, _rest = rule.partition(":")
    _module, _, _replacement = _rest.partition("=")
    sys.meta_path.insert(0, Finder(_consumer, _module, _replacement))
