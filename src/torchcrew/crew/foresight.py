"""What a new process will import at once, so that the zygote can do it once for all.

torch imports a large part of itself, one to two seconds' worth, when the first optimizer is made or used, or the first
model is wrapped for data-parallel training. In each of four processes that is what takes longest of a training's start.
A guess that is wrong costs the zygote that import, or the process its own.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ("TRAINING", "expected_imports", "imports_of_program")

#: A module that imports what training does: its name can be told to a zygote by a process that has no torch yet.
TRAINING = "torchcrew.crew.training"

#: The words by which a program's text shows that it trains.
_TRAINS = re.compile(rb"\boptim\b|\bDistributedDataParallel\b|\btorch\.compile\b")
#: More of a file is not read.
_READ_MAX = 1 << 20
_OWN = ("torch.", "torchcrew.")


def expected_imports(objects: Iterable[Any]) -> tuple[str, ...]:
    """Return the modules that the zygote should have for a process.

    Args:
        objects: the process's target and arguments.
    """
    if _has_trained() or any(_mentions_training(path) for obj in objects for path in _files(obj)):
        return (TRAINING,)
    return ()


def imports_of_program(name: str, module: bool = False) -> tuple[str, ...]:
    """Return the modules that the zygote should have for processes that run a program.

    Args:
        name: a script, a folder with a ``__main__.py``, or with ``module`` the name of a module, which is looked for
            but not imported.
        module: see ``name``.
    """
    paths = [name, os.path.join(name, "__main__.py")]
    if module:
        bases = [os.path.join(folder, *name.split(".")) for folder in ("", *sys.path)]
        paths = [path for base in bases for path in (f"{base}.py", os.path.join(base, "__main__.py"))]
    return (TRAINING,) if any(os.path.isfile(path) and _mentions_training(path) for path in paths) else ()


def _has_trained() -> bool:
    """Whether this process has made an optimizer, which its children then use."""
    if "torch" not in sys.modules:
        return False
    from torchcrew.torch_private import IMPORTED_BY_TRAINING

    return IMPORTED_BY_TRAINING in sys.modules


def _files(obj: Any) -> Iterator[str]:
    """The file of the module that a function, method or partial application comes from."""
    while isinstance(obj, functools.partial):
        obj = obj.func
    name = getattr(obj, "__module__", None) if callable(obj) else None
    if isinstance(name, str) and not f"{name}.".startswith(_OWN):
        path = getattr(sys.modules.get(name), "__file__", None)
        if path:
            yield path


@functools.lru_cache(maxsize=64)
def _mentions_training(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return _TRAINS.search(file.read(_READ_MAX)) is not None
    except OSError:  # in an archive, or gone
        return False
