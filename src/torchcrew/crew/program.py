"""A program to be run as `__main__` in this process, found the way ``python SCRIPT`` and ``python -m MODULE`` find it.

`runpy` would do most of it, but puts the old `__main__` back and runs scripts under temporary names: pickles of the
program's classes and spawned workers need a real, lasting ``sys.modules["__main__"]`` with the right ``__file__`` and
``__spec__``, because that is what a child process imports again.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import sys
import zipfile
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any

__all__ = ("Program", "ProgramNotFound", "execute", "find_module", "find_script", "without_our_frames")

_replaced: list[ModuleType] = []  # the command's own __main__: its globals are in use until the process ends


class ProgramNotFound(Exception):
    """The script or module is not there or cannot be run; carries the exit status that python gives."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Program:
    """What will be `__main__`."""

    argv0: str
    """``sys.argv[0]``."""
    file: str
    """``__main__.__file__``."""
    code: CodeType
    spec: ModuleSpec | None
    """``__main__.__spec__``; None for a plain script, as under python."""
    loader: Any
    """``__main__.__loader__``."""


def find_script(path: str) -> Program:
    """The program in a file, or in the ``__main__.py`` of a folder or zip archive; sets ``sys.path[0]``.

    Raises:
        ProgramNotFound: there is no such file, or no `__main__` in the folder.
        SyntaxError: as python's.
    """
    if os.path.isdir(path) or (os.path.isfile(path) and zipfile.is_zipfile(path)):
        folder = os.path.join(os.getcwd(), path)
        _set_first_path(folder)
        spec = PathFinder.find_spec("__main__", [folder])
        if spec is None:
            raise ProgramNotFound(f"can't find '__main__' module in {path!r}", 1)
        return _from_spec(spec, argv0=path)
    file = os.path.join(os.getcwd(), path)  # python makes it absolute and leaves it otherwise as typed
    try:
        with io.open_code(file) as stream:
            source = stream.read()
    except OSError as error:
        raise ProgramNotFound(f"can't open file {file!r}: [Errno {error.errno}] {error.strerror}", 2) from None
    _set_first_path(os.path.dirname(os.path.realpath(file)))
    code = compile(source, file, "exec", dont_inherit=True)
    return Program(path, file, code, None, SourceFileLoader("__main__", file))


def find_module(name: str) -> Program:
    """The program in a module, or in the ``__main__`` of a package; sets ``sys.path[0]`` to the current folder.

    Raises:
        ProgramNotFound: there is no such module, or the package has no `__main__`.
        Exception: whatever importing the parent package raises.
    """
    _set_first_path(os.getcwd())
    spec = _spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        package, name = name, f"{name}.__main__"
        spec = _spec(name)
        if spec is None:
            raise ProgramNotFound(
                f"No module named {name}; {package!r} is a package and cannot be directly executed", 1
            )
    if spec is None:
        raise ProgramNotFound(f"No module named {name}", 1)
    return _from_spec(spec, argv0=spec.origin or name)


def execute(program: Program, arguments: list[str]) -> None:
    """Run the program to its end as `__main__` with ``sys.argv[1:] == arguments``; what it raises comes out."""
    main = ModuleType("__main__")
    attributes = {
        "__file__": program.file,
        "__cached__": program.spec.cached if program.spec else None,
        "__loader__": program.loader,
        "__package__": program.spec.parent if program.spec else None,
        "__spec__": program.spec,
        "__builtins__": builtins,
    }
    if sys.version_info < (3, 14):
        attributes["__annotations__"] = {}
    vars(main).update(attributes)
    _replaced.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    sys.argv[:] = [program.argv0, *arguments]
    exec(program.code, vars(main))


def without_our_frames(traceback: TracebackType | None, *files: str) -> TracebackType | None:
    """The part of a traceback that begins in the program: frames of ``files``, this one and importlib go."""
    ours = {__file__, *files}
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if file not in ours and not file.startswith("<frozen importlib"):
            break
        traceback = traceback.tb_next
    return traceback


def _spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # A missing parent is "no such module"; a module that the parent misses is the parent's error.
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise ProgramNotFound(f"No module named {error.name}", 1) from None
        raise
    except ValueError:
        raise ProgramNotFound(f"{name} has no __spec__ and cannot be run with -m", 1) from None


def _from_spec(spec: ModuleSpec, argv0: str) -> Program:
    loader: Any = spec.loader
    code = loader.get_code(spec.name) if hasattr(loader, "get_code") else None
    if code is None:
        raise ProgramNotFound(f"No code object available for {spec.name}", 1)
    return Program(argv0, spec.origin or argv0, code, spec, loader)


def _set_first_path(folder: str) -> None:
    """Put the program's folder where the command's own stands (python put it there when it started the command)."""
    if getattr(sys.flags, "safe_path", False):
        return
    if sys.path:
        sys.path[0] = folder
    else:
        sys.path.append(folder)
