"""What a new process will import at once, so that the zygote can do it once for all.

torch imports a large part of itself, one to two seconds' worth, when the first optimizer is made or used, or the first
model is wrapped for data-parallel training. In each of four processes that is what takes longest of a training's start.
A guess that is wrong costs the zygote that import, or the process its own.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torchcrew.torch_private import IMPORTED_BY_TRAINING

__all__ = ("expected_imports",)

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
    # This process has it if it has made an optimizer, which its children then use.
    if IMPORTED_BY_TRAINING in sys.modules or any(_mentions_training(path) for obj in objects for path in _files(obj)):
        return (IMPORTED_BY_TRAINING,)
    return ()


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
