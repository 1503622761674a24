"""What travels to another process by reference and what by value."""

from __future__ import annotations

import collections
import enum
import functools
import io
import os
import pickle
import runpy
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.crew.programs import SOURCE
from torchcrew.crew import functions


class Color(enum.Enum):
    RED = 1


Pair = collections.namedtuple("Pair", "a b")


def named(x: int) -> int:
    return x + 1


class Holder:
    def method(self) -> str:
        return "method"

    @staticmethod
    def static() -> str:
        return "static"

    class Inner:
        pass


@pytest.mark.parametrize(
    "obj",
    [named, Holder, Holder.method, Holder.static, Holder.Inner, Color, Color.RED, Pair, len, int, type(None), os.path],
    ids=str,
)
def test_what_a_module_has_goes_by_reference(obj: Any) -> None:
    """It is the very same there."""
    assert pickle.loads(functions.dumps(obj)) is obj


@pytest.mark.parametrize("value", [Pair(1, 2), functools.partial(named, 3), [1, {"a": (2.5, None)}], ValueError("x")])
def test_data_is_pickled_as_ever(value: Any) -> None:
    """Its types are the receiver's own."""
    back = pickle.loads(functions.dumps(value))
    assert repr(back) == repr(value)
    assert type(back) is type(value)


def test_bound_methods_and_identity_within_one_pickle() -> None:
    """What is one object stays one."""
    holder = Holder()
    method, back = pickle.loads(functions.dumps((holder.method, holder)))
    assert method() == "method"
    assert method.__self__ is back


def test_tensors_are_shared_as_torch_does_it() -> None:
    """The registered reductions hold, also inside of what goes by value."""
    tensor = torch.zeros(3)
    for arrived in (
        pickle.loads(functions.dumps(tensor)),
        pickle.loads(functions.dumps(lambda: tensor))(),
    ):
        arrived += 1
    assert tensor.tolist() == [2, 2, 2]


def test_arrays_arrive() -> None:
    """By protocol 5, in the pickle."""
    array = np.arange(1000)
    assert (pickle.loads(functions.dumps(array)) == array).all()


def test_closures_lambdas_and_local_classes_go_by_value() -> None:
    """With what they refer to; what can go by reference does so inside of them, too."""
    offset = 10

    class Local:
        def get(self) -> int:
            return named(offset)

    function, local, kept = pickle.loads(functions.dumps((lambda x: named(x) + offset, Local(), lambda: Holder)))
    assert function(1) == 12
    assert local.get() == 11
    assert kept() is Holder


def test_code_that_goes_by_value_knows_its_file() -> None:
    """So that a traceback in the other process shows the line."""
    outer = pickle.loads(functions.dumps(lambda: lambda: 1))
    assert outer.__code__.co_filename == outer().__code__.co_filename == __file__


def test_a_function_that_its_module_no_longer_has() -> None:
    """The name leads to something else, so by value."""
    decorated = functools.wraps(named)(lambda x: x * 100)
    assert pickle.loads(functions.dumps(decorated))(2) == 200


def test_an_object_that_decides_itself_is_asked_once() -> None:
    """`__reduce__` holds."""

    class Own:
        times = 0

        def __reduce__(self) -> Any:
            Own.times += 1
            return named, (1,)

    assert pickle.loads(functions.dumps([Own()])) == [2]
    assert Own.times == 1


def test_errors_say_what_travels_by_value() -> None:
    """The error is pickle's, and a note says which function is to blame and what to do."""
    lock = threading.Lock()

    def closure() -> None:
        lock.acquire()

    with pytest.raises(TypeError, match="cannot pickle") as caught:
        functions.dumps(closure)
    if sys.version_info >= (3, 11):
        (note,) = caught.value.__notes__
        assert ".<locals>.closure: sent to the new process by value" in note
        assert "top level" in note


@pytest.mark.parametrize("make", [threading.Lock, lambda: os.fdopen(os.open(os.devnull, 0)), lambda: memoryview(b"")])
def test_stocks_errors_stay(make: Any) -> None:
    """What stock refuses is refused: no file is read, nothing is copied unasked; there is no note."""
    value = make()
    with pytest.raises(TypeError, match="cannot pickle") as caught:
        functions.dumps(value)
    assert not getattr(caught.value, "__notes__", [])
    if hasattr(value, "close"):
        value.close()


def test_deep_recursion_is_pickles_own_error() -> None:
    """Not another class."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RecursionError):
        functions.dumps(deep)


@pytest.mark.parametrize("dump", [pickle.dumps, functions.dumps])
def test_portable_arrives_as_what_it_holds(dump: Any) -> None:
    """Whoever pickles it; nested in others as well."""
    value = 5
    function, same = pickle.loads(dump((functions.Portable(lambda: value), functions.Portable(named))))
    assert function() == 5
    assert same is named


def test_a_failed_dump_leaves_no_trace() -> None:
    """The next pickle of another kind is its own."""
    with pytest.raises(TypeError):
        functions.dumps(threading.Lock())
    assert pickle.loads(pickle.dumps(functions.Portable(lambda: 1)))() == 1


SCRIPT = """
import sys

def plain(): pass
async def coroutine(): pass
class Plain:
    def method(self): pass
    class Inner: pass

def decorate(f):
    import functools
    @functools.wraps(f)
    def wrapper(): return f()
    return wrapper

@decorate
def decorated(): pass

try:
    def in_try(): pass
except ImportError:
    pass
if sys.argv:
    def in_if(): pass
alias = lambda: 0
text = '''
def in_text(): pass
'''

if __name__ == "__main__":
    def guarded(): pass
    class Guarded: pass
    for index in range(1):
        def guarded_deep(): pass
else:
    def in_else(): pass
"""

BY_REFERENCE = ["plain", "coroutine", "Plain", "Plain.method", "Plain.Inner", "decorated", "in_try", "in_if"]
BY_VALUE = ["alias", "guarded", "Guarded", "guarded_deep"]


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A script that runs as `__main__`."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(compile(SCRIPT, str(path), "exec"), vars(module))
    return module


def at(module: types.ModuleType, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", BY_REFERENCE + BY_VALUE)
def test_what_a_script_has(main: types.ModuleType, name: str) -> None:
    """By reference if importing the script makes it: a spawned process does that, under another name."""
    assert functions.by_reference(at(main, name)) is (name in BY_REFERENCE)
    imported = runpy.run_path(str(main.__file__), run_name="__mp_main__")
    assert (name.partition(".")[0] in imported) is (name in BY_REFERENCE or name == "alias")


@pytest.mark.parametrize("spec", ["__main__", "package.__main__"])
def test_mains_that_are_not_imported_again(main: types.ModuleType, spec: str) -> None:
    """A folder, an archive and a package's `__main__` are never imported by a spawned process."""
    import importlib.machinery

    main.__spec__ = importlib.machinery.ModuleSpec(spec, None)
    assert not functions.by_reference(main.plain)
    main.__spec__ = importlib.machinery.ModuleSpec("package.module", None)
    assert functions.by_reference(main.plain)


def test_a_prompt_after_a_script(main: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -i script.py`: what was typed is not in the script."""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    exec(compile("def typed(): pass\ndef plain(): pass", "<stdin>", "exec"), vars(main))
    assert not functions.by_reference(main.typed)
    assert not functions.by_reference(main.plain)
    assert functions.by_reference(main.coroutine)


def test_no_script_at_all(main: types.ModuleType) -> None:
    """A notebook, `python -c`, standard input."""
    del main.__file__
    assert not functions.by_reference(main.plain)
    assert not functions.by_reference(main.Plain)
    assert functions.by_reference(named)


def test_a_script_that_is_not_there_any_more(main: types.ModuleType, tmp_path: Path) -> None:
    """By reference: the new process says that it misses the script."""
    (tmp_path / "script.py").unlink()
    assert functions.by_reference(main.plain)


def test_a_script_that_changes_is_read_again(main: types.ModuleType, tmp_path: Path) -> None:
    """Its time is looked at."""
    assert not functions.by_reference(main.guarded)
    path = tmp_path / "script.py"
    path.write_text("def guarded(): pass\n")
    os.utime(path, (1, 1))
    assert functions.by_reference(main.guarded)


def test_a_script_in_any_encoding(main: types.ModuleType, tmp_path: Path) -> None:
    """Its bytes are enough for a name; a broken one is the new process's to complain of."""
    (tmp_path / "script.py").write_bytes(b"# coding: latin-1\n# \xe9\ndef plain(): pass\n(")
    assert functions.by_reference(main.plain)
    assert functions.by_reference(main.in_if)


def test_pickles_of_a_program_without_a_script() -> None:
    """They are read by a process that has nothing of it."""
    code = """
    import sys
    from torchcrew.crew import functions
    STEP = 5
    class Config:
        step = STEP
    def add(x):
        return x + Config().step
    sys.stdout.buffer.write(functions.dumps((add, Config(), [lambda x: add(x) * 2])))
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        check=True,
        timeout=30,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    add, config, (twice,) = pickle.load(io.BytesIO(run.stdout))
    assert add(1) == 6
    assert config.step == 5
    assert twice(1) == 12
