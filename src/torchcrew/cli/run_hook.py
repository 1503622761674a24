"""An import hook that puts torchcrew under torch's `DataLoader` and `torch.multiprocessing` when torch is imported.

    torchcrew run train.py            start()  ─┐
    child interpreter (spawn,                    ├─► finder on sys.meta_path ─► import torch … done ─► data.install()
    forkserver, subprocess)   sitecustomize ─────┘        (no torch, no cost)        multiprocessing.install()

A program that never imports torch never pays for it. `import torch` imports ``torch.utils.data.dataloader`` while
torch itself is only half made, so the hook waits until both have run to their end before it imports `torchcrew.data`.

The default start method is set before the program runs, in a way that leaves it unset: ``set_start_method`` works as if
nobody had been here, and a child of `multiprocessing` gets its parent's method, whichever that is.

This file uses the standard library only and is loaded by path in child interpreters (`run_site`), which may belong to
another environment in which torchcrew is not installed; there it does nothing.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # importing `typing` would cost every child interpreter more than all of this file
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ("METHOD_VARIABLE", "RUN_VARIABLE", "set_default_start_method", "start")

RUN_VARIABLE = "TORCHCREW_RUN"
"""Set by `torchcrew run` for the processes of its program: ``report`` or ``quiet``."""

METHOD_VARIABLE = "TORCHCREW_START_METHOD"
"""The default start method in the processes of the program; set for ``torchcrew run --start-method``."""

_WATCHED = frozenset({"torch", "torch.utils.data.dataloader"})


class _AfterTorch:
    """A finder that finds nothing by itself: it learns when the modules in `_WATCHED` have been executed."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then
        self._missing = set(_WATCHED)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._missing:
            return None
        spec = self._ask_the_others(name, path, target)
        if spec is not None and spec.loader is not None:
            self._watch(name, spec)
        return spec

    def _ask_the_others(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None

    def _watch(self, name: str, spec: ModuleSpec) -> None:
        # The import system calls `spec.loader.exec_module`; a loader object belongs to one module, so an attribute of
        # the instance is the smallest place to stand in, and it is gone again before anybody can look at it.
        loader = spec.loader

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # type: ignore[union-attr]
            loader.exec_module(module)  # type: ignore[union-attr]
            self._executed(name)

        loader.exec_module = exec_module  # type: ignore[union-attr,method-assign]

    def _executed(self, name: str) -> None:
        self._missing.discard(name)
        if not self._missing:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self._then()


def set_default_start_method(method: str) -> None:
    """Have processes started by this method in this process until the program sets another.

    Raises:
        ValueError: there is no such method.
    """
    from multiprocessing import context

    if method == "zygote":
        from torchcrew.crew import zygote

        zygote.register(zygote.get_context())
    default = vars(context)["_default_context"]
    default._default_context = default.get_context(method)


def start(on_failure: Callable[[Exception], None], then: Callable[[], None] | None = None) -> None:
    """Install the engine once torch is there: now, or when the program imports it.

    Args:
        on_failure: gets the exception when torchcrew cannot be imported or installed; stock's engine stays.
        then: called after the engine has been installed.
    """

    def install() -> None:
        try:
            from torchcrew.data import install
            from torchcrew.multiprocessing.install import install as install_multiprocessing

            install_multiprocessing()
            install()
        except Exception as error:
            on_failure(error)
        else:
            if then is not None:
                then()

    if sys.modules.keys() >= _WATCHED:
        install()
    elif not any(isinstance(finder, _AfterTorch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTorch(install))
