"""Every public name of `torch.multiprocessing`, and of the `multiprocessing` below it, with the same signature."""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
import subprocess
import sys
import types
from typing import Any

import pytest
import torch.multiprocessing

import torchcrew.multiprocessing as mp

METHODS = ("fork", "spawn", "forkserver")
#: Names of modules that stock's file happens to have imported.
BY_ACCIDENT = {"torch", "sys", "multiprocessing", "context"}
STOCK_SUBMODULES = (
    "connection",
    "context",
    "dummy",
    "dummy.connection",
    "forkserver",
    "heap",
    "managers",
    "pool",
    "process",
    "queues",
    "reduction",
    "resource_sharer",
    "resource_tracker",
    "shared_memory",
    "sharedctypes",
    "synchronize",
    "util",
)
TORCH_SUBMODULES = ("pool", "queue", "reductions", "spawn", "_atfork")


def public(module: Any) -> set[str]:
    return {name for name in dir(module) if not name.startswith("_")} - BY_ACCIDENT


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def differences(ours: Any, stock: Any, names: set[str]) -> list[str]:
    """What is missing or has another signature, methods of classes included."""
    found = []
    for name in sorted(names):
        if not hasattr(ours, name):
            found.append(f"{name} is missing")
            continue
        mine, theirs = getattr(ours, name), getattr(stock, name)
        if callable(theirs) and not (inspect.isclass(theirs) and issubclass(theirs, BaseException)):
            try:
                wanted = parameters(theirs)
            except ValueError:  # C code that does not say
                continue
            if parameters(mine) != wanted:
                found.append(f"{name}: {inspect.signature(mine)} instead of {inspect.signature(theirs)}")
            if inspect.isclass(theirs) and mine is not theirs:
                methods = {method for method in public(theirs) if callable(getattr(theirs, method))}
                found += [f"{name}.{line}" for line in differences(mine, theirs, methods)]
    return found


@pytest.mark.parametrize("stock", [torch.multiprocessing, multiprocessing], ids=lambda module: module.__name__)
def test_every_name_has_stocks_signature(stock: types.ModuleType) -> None:
    """All that dir() shows there is here, and takes the same arguments."""
    names = public(stock)
    assert len(names) > 40
    assert differences(mp, stock, names) == []
    assert names - set(dir(mp)) <= {"reduction", *STOCK_SUBMODULES}
    assert set(stock.__all__) <= set(mp.__all__)


@pytest.mark.parametrize("method", [*METHODS, "zygote"])
def test_every_method_of_the_contexts_has_stocks_signature(method: str) -> None:
    """Contexts, their classes and the process class."""
    ours = mp.get_context(method)
    stock = multiprocessing.get_context("spawn" if method == "zygote" else method)
    assert differences(ours, stock, public(stock)) == []


def test_a_difference_would_be_found() -> None:
    """The comparison itself sees a missing name, another parameter and another default."""
    ours, stock = types.SimpleNamespace(a=lambda x: x, b=lambda x=1: x), types.SimpleNamespace()
    stock.a, stock.b, stock.c = (lambda y: y), (lambda x=2: x), 0
    assert len(differences(ours, stock, {"a", "b", "c"})) == 3


def test_private_names_that_others_use() -> None:
    """They are torch's own objects."""
    for name in ("_prctl_pr_set_pdeathsig", "_set_thread_name", "_get_thread_name", "_all_sharing_strategies"):
        assert getattr(mp, name) is getattr(torch.multiprocessing, name)
    assert mp.ENV_VAR_PARALLEL_START == torch.multiprocessing.ENV_VAR_PARALLEL_START
    assert issubclass(mp.SpawnContext, torch.multiprocessing.ProcessContext)
    with pytest.raises(AttributeError, match=r"torchcrew\.multiprocessing' has no attribute 'no_such_name'"):
        _ = mp.no_such_name  # type: ignore[attr-defined]
    assert not hasattr(mp, "__no_such_name__")


def test_the_sharing_strategy_is_torchs() -> None:
    """Set here is set there."""
    before = torch.multiprocessing.get_sharing_strategy()
    try:
        mp.set_sharing_strategy("file_system")
        assert torch.multiprocessing.get_sharing_strategy() == mp._sharing_strategy == "file_system"  # type: ignore[attr-defined]
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    assert mp.get_sharing_strategy() == before
    assert mp.get_all_sharing_strategies() is torch.multiprocessing.get_all_sharing_strategies()


@pytest.mark.parametrize("name", STOCK_SUBMODULES)
def test_the_standard_librarys_submodules(name: str) -> None:
    """Importable below our name; what has no file here is the library's module itself, undisturbed."""
    stock = importlib.import_module(f"multiprocessing.{name}")
    ours = importlib.import_module(f"torchcrew.multiprocessing.{name}")
    assert stock.__spec__ is not None
    assert stock.__spec__.name == stock.__name__ == f"multiprocessing.{name}"
    missing = [each for each in public(stock) if not hasattr(ours, each)]
    assert (ours is stock) or (ours.__name__.startswith("torchcrew.") and not missing)
    assert differences(ours, stock, {each for each in public(stock) if each in getattr(stock, "__all__", ())}) == []


@pytest.mark.parametrize("name", TORCH_SUBMODULES)
def test_torchs_submodules(name: str) -> None:
    """The same for torch's, with the signatures of what is made there."""
    stock = importlib.import_module(f"torch.multiprocessing.{name}")
    stock = sys.modules[f"torch.multiprocessing.{name}"]
    importlib.import_module(f"torchcrew.multiprocessing.{name}")
    ours = sys.modules[f"torchcrew.multiprocessing.{name}"]
    names = {each for each in public(stock) if getattr(getattr(stock, each), "__module__", None) == stock.__name__}
    assert [each for each in names if not hasattr(ours, each)] == []
    functions = {each for each in names if inspect.isfunction(getattr(stock, each))}
    assert differences(ours, stock, functions) == []


STATEMENTS = (
    "import torchcrew.multiprocessing.managers as m; import multiprocessing.managers as s; assert m is s",
    "from torchcrew.multiprocessing import managers as m; import multiprocessing.managers as s; assert m is s",
    "import torchcrew.multiprocessing as mp; mp.managers.SyncManager",
    "import torchcrew.multiprocessing.dummy.connection as m, multiprocessing.dummy.connection as s; assert m is s",
    "from torchcrew.multiprocessing.context import BaseContext, TimeoutError, assert_spawning, reduction",
    "from torchcrew.multiprocessing.spawn import spawn as f; import torchcrew.multiprocessing as mp; "
    "assert mp.spawn is f",
    "import torchcrew.multiprocessing.spawn as f; assert callable(f)",
    "from torchcrew.multiprocessing import queues; assert queues.__name__ == 'torchcrew.multiprocessing.queues'",
    "from torchcrew.multiprocessing import *; Process, Queue, spawn",
    "import torchcrew; torchcrew.multiprocessing.Process",
    "import torchcrew.multiprocessing.reductions as m, torch.multiprocessing.reductions as s; assert m is s",
)


def test_ways_to_import() -> None:
    """Each in a process of its own that has imported torch and nothing of ours."""
    program = (
        "import os, sys, traceback, torch\n"
        "loaded = {name for name in sys.modules if name.startswith('torchcrew')}\n"
        # The backend's name, which torch asks all installed packages for.
        "assert loaded <= {'torchcrew', 'torchcrew.collectives', 'torchcrew.collectives.registration'}, loaded\n"
        "for statement in sys.argv[1:]:\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        try:\n"
        "            exec(statement, {})\n"
        "        except BaseException:\n"
        "            traceback.print_exc()\n"
        "            os._exit(1)\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(pid, 0)[1] == 0, statement\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program, *STATEMENTS], check=True, timeout=30)


def test_what_is_not_there_is_not_there() -> None:
    """The errors are the import system's."""
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'torchcrew.multiprocessing.nothing'"):
        importlib.import_module("torchcrew.multiprocessing.nothing")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("torchcrew.multiprocessing.managers.nothing")


def test_importing_starts_nothing() -> None:
    """No process, no thread of ours, no variable; the default start method is not set."""
    code = (
        "import os, threading, torch; before = dict(os.environ); fds = len(os.listdir('/proc/self/fd'))\n"
        "import torchcrew.multiprocessing as mp, multiprocessing\n"
        "assert dict(os.environ) == before and threading.active_count() == 1\n"
        "assert len(os.listdir('/proc/self/fd')) == fds\n"
        "assert not open(f'/proc/self/task/{os.getpid()}/children').read()\n"
        "assert multiprocessing.get_start_method(allow_none=True) is None\n"
        "assert torch.multiprocessing.Process is multiprocessing.Process\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=30)
