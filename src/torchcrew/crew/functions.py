"""Functions and classes on their way to another process: by reference where it can import them, else by value.

By reference is what pickle does: the other process imports the module and looks the name up, so that it has *the* same
function, and `isinstance` holds for what comes back. It fails for what has no name to be found by: a lambda, a closure,
a notebook's cell, everything of a program that came from ``python -c``, standard input or a prompt. These travel by
value, as cloudpickle does it: their code, what they refer to, and so on.

`__main__` is the subtle case. A new process imports the script again (as ``__mp_main__``), so that what the script
defines can go by reference, unlike with cloudpickle alone; but not what stands under ``if __name__ == "__main__":``,
nor anything where there is no script to import. The rules here are those of `multiprocessing.spawn`.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import functools
import io
import linecache
import os
import pickle
import re
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing import process
from multiprocessing.reduction import ForkingPickler
from typing import IO, Any

import cloudpickle

__all__ = ("Pickler", "Portable", "by_reference", "dump", "dumps", "is_guarded", "without_missing_script")

_MAIN = ("__main__", "__mp_main__")
#: cloudpickle would send an open file as its contents, and a memoryview as bytes; stock's error is better than that.
_LEFT_TO_STOCK = (io.TextIOWrapper, memoryview)

_dumping = threading.local()


def dump(obj: Any, file: IO[bytes]) -> None:
    """Pickle ``obj`` into ``file`` for a new process; called like `multiprocessing.reduction.dump`, in its place.

    What multiprocessing and torch have registered (tensors, connections, locks) travels as with stock. The other
    process reads it with plain `pickle`.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: as pickle's. If something travels by value, the error says so
            in a note (Python 3.11 and later): it is mostly a global variable of such a function that cannot be sent.
    """
    pickler = Pickler(file)
    before = getattr(_dumping, "depth", 0)
    _dumping.depth = before + 1
    try:
        # Not cloudpickle's, which makes another error of a recursion that is too deep.
        pickle.Pickler.dump(pickler, obj)
    except Exception as error:
        pickler.explain(error)
        raise
    finally:
        _dumping.depth = before


def dumps(obj: Any) -> bytes:
    """Pickle ``obj`` as `dump` does."""
    buffer = io.BytesIO()
    dump(obj, buffer)
    return buffer.getvalue()


def without_missing_script(preparation: dict[str, Any]) -> dict[str, Any]:
    """Return `multiprocessing`'s preparation data of a new process without a script that is no file.

    With it the process would fail to import it, as stock's do. What such a script defines goes by value.
    """
    if _is_no_file(preparation.get("init_main_from_path", "")):
        return {key: value for key, value in preparation.items() if key != "init_main_from_path"}
    return preparation


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles for a process on this machine that has the same modules and imports the same script."""

    def __init__(
        self,
        file: IO[bytes],
        buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None,
        reducers: Mapping[type, Any] | None = None,
    ) -> None:
        """Write to ``file``; `by_value` names what was found to travel so.

        Args:
            file: takes the pickle.
            buffer_callback: as `pickle.Pickler`'s.
            reducers: of a transport of its own, in place of those that serve while a process starts.
        """
        forking: Any = ForkingPickler
        table = dict(cloudpickle.Pickler.dispatch_table)
        for left in _LEFT_TO_STOCK:
            table.pop(left, None)
        table[types.CodeType] = functools.partial(_reduce_code, table[types.CodeType])
        if reducers is None:
            reducers = {**forking._copyreg_dispatch_table, **forking._extra_reducers}
        # Before the next line, which reads it once.
        self.dispatch_table = collections.ChainMap(reducers, table)  # type: ignore[arg-type]
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=buffer_callback)
        self.by_value: list[str] = []

    def explain(self, error: BaseException) -> None:
        """Say in the traceback of an error of `dump` what travelled by value, and what to do."""
        if self.by_value:
            _add_note(error, self.by_value)

    def reducer_override(self, obj: Any) -> Any:
        """Reduce functions and classes that must travel by value; pickle does the rest."""
        if (
            getattr(obj, "__module__", None) in _MAIN
            and isinstance(obj, (types.FunctionType, type))
            and by_reference(obj)
        ):
            return NotImplemented
        reduced = super().reducer_override(obj)
        if reduced is not NotImplemented and obj.__module__ not in (None, "builtins"):
            self.by_value.append(getattr(obj, "__qualname__", repr(obj)))
        return reduced


class Portable:
    """Anything callable or not, pickled by these rules whoever pickles it; arrives as what it holds."""

    def __init__(self, value: Any) -> None:
        """Hold ``value``; a process that is forked gets this object and takes its `value`."""
        self.value = value

    def __reduce__(self) -> Any:
        if getattr(_dumping, "depth", 0):  # our pickler is at work already
            return _itself, (self.value,)
        return pickle.loads, (dumps(self.value),)


def _itself(value: Any) -> Any:
    return value


def _reduce_code(reduce: Callable[[types.CodeType], tuple[Any, ...]], code: types.CodeType) -> tuple[Any, ...]:
    """Reduce code as cloudpickle does, which forgets the file: a traceback in the other process shall show the line."""
    name = code.co_filename
    # A notebook's cell is in no file: its lines go along, for tracebacks to show them.
    lines = linecache.getlines(name) if name in linecache.cache and not os.path.exists(name) else []
    return _code_of_file, (name, *reduce(code), lines)


def _code_of_file(
    filename: str, make: Callable[..., types.CodeType], arguments: tuple[Any, ...], lines: list[str]
) -> types.CodeType:
    if lines and filename not in linecache.cache:
        linecache.cache[filename] = sum(map(len, lines)), None, lines, filename
    return make(*arguments).replace(co_filename=filename)


def by_reference(obj: Any) -> bool:
    """Whether a new process finds the function or class ``obj`` by its name; what is neither function nor class does.

    For what a module other than `__main__` defines, this is so if the module is imported and has it by that name.
    """
    if not isinstance(obj, (types.FunctionType, type)):
        return True
    module = getattr(obj, "__module__", None)
    qualname = getattr(obj, "__qualname__", obj.__name__)
    if module is None:
        return isinstance(obj, type)  # pickle looks through all modules for a class without one
    owner = sys.modules.get(module)
    if owner is None or module not in _MAIN:
        # A built-in type such as `NoneType` is in no module by its name; pickle knows those.
        return owner is not None and (_found(owner, qualname) is obj or module == "builtins")
    main = sys.modules["__main__"]
    script = _script(main)
    if script is None or _found(main, qualname) is not obj:
        return False
    typed = getattr(getattr(obj, "__code__", None), "co_filename", "").startswith("<")
    if typed and hasattr(sys, "ps1"):  # at the prompt of `python -i script.py`
        return False
    return _defines(script, qualname.partition(".")[0])


def _found(module: types.ModuleType, qualname: str) -> Any:
    """What stands under a dotted name in a module; None where nothing does."""
    found: Any = module
    for name in qualname.split("."):
        found = vars(found).get(name) if name != "<locals>" and hasattr(found, "__dict__") else None
        if isinstance(found, (staticmethod, classmethod)):
            found = found.__func__
    return found


def _script(main: types.ModuleType) -> str | None:
    """The file that a new process imports in place of `__main__`; None when it imports none."""
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None and (name == "__main__" or name.endswith(".__main__")):
        return None
    path: str | None = getattr(main, "__file__", None)
    if name is None and path is not None:
        if os.path.splitext(os.path.basename(path))[0] == "ipython":
            return None
        original: str | None = process.ORIGINAL_DIR  # type: ignore[attr-defined]
        path = os.path.join(original or "", path)
        if _is_no_file(path):
            return None
    return path if name is None else (path or "")


def _is_no_file(path: str) -> bool:
    """Whether a script's path only says where it came from: Python calls one from standard input ``<stdin>``."""
    name = os.path.basename(path)
    return name.startswith("<") and name.endswith(">") and not os.path.exists(path)


def _defines(script: str, name: str) -> bool:
    """Whether importing a script makes a name: it is not made under the main guard alone."""
    try:
        status = os.stat(script)
    except OSError:
        return True  # no source to look at; the new process will say what it does not find
    return _source_defines(script, status.st_mtime_ns, name)


def is_guarded(script: str, name: str) -> bool:
    """Whether a script makes a name under its main guard alone."""
    return os.path.isfile(script) and not _defines(script, name)


@functools.lru_cache(maxsize=256)
def _source_defines(script: str, _changed: int, name: str) -> bool:
    try:
        with open(script, "rb") as file:
            source = file.read()
    except OSError:
        return True
    if re.search(rb"^(async[ \t]+def|def|class)[ \t]+" + re.escape(name.encode()) + rb"\b", source, re.MULTILINE):
        return True  # in the first column, so under no guard
    guarded: set[str] = set()
    imported: set[str] = set()
    with contextlib.suppress(SyntaxError, ValueError):
        for statement in ast.parse(source).body:
            if isinstance(statement, ast.If) and _is_guard(statement.test):
                guarded.update(_names(statement.body))
                imported.update(_names(statement.orelse))
            else:
                imported.update(_names([statement]))
    return name in imported or name not in guarded


def _is_guard(test: ast.expr) -> bool:
    """Whether a condition asks for ``__name__ == "__main__"``, maybe among others."""
    parts = list(ast.walk(test))
    return (
        any(isinstance(part, ast.Name) and part.id == "__name__" for part in parts)
        and any(isinstance(part, ast.Constant) and part.value == "__main__" for part in parts)
        and not any(isinstance(part, (ast.NotEq, ast.Not)) for part in parts)
    )


def _names(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """Names that statements of a module bind, whatever blocks they stand in."""
    todo: list[ast.AST] = list(statements)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
            continue
        if isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        todo.extend(ast.iter_child_nodes(node))


def _add_note(error: BaseException, names: list[str]) -> None:
    """Say in an error's traceback what travelled by value, and what to do."""
    if sys.version_info >= (3, 11):
        error.add_note(
            f"{', '.join(dict.fromkeys(names))}: sent to the new process by value, because it could not import it "
            "by name. Everything that it refers to has then to be picklable too. Define it at the top level of a "
            "module or script, outside of the main guard, and pass what it needs as arguments."
        )
