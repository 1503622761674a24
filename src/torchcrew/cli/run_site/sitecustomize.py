"""Runs at the start of every Python process below `torchcrew run`, because its folder is first on their PYTHONPATH.

Spawned workers, the forkserver, ranks started by torchrun and plain ``subprocess`` calls of Python all begin in a fresh
interpreter, and the environment is the one thing that reaches all of them. It takes its own traces away (the entry on
sys.path, its name in sys.modules), starts the import hook, and then lets the environment's own sitecustomize run.
Nothing here may fail, print or be slow: it also runs in interpreters that have nothing to do with torch.
"""

import os
import sys

__all__ = ()

_HERE = os.path.dirname(os.path.abspath(__file__))


def _report_line() -> None:
    """One line about this child's loaders, at its end."""
    try:
        from torchcrew.cli.report import child_line
        from torchcrew.data import loader_stats

        line = child_line(loader_stats(), os.environ.get("RANK"), os.getpid())
        if line:
            sys.stderr.write(line + "\n")
    except Exception:
        pass


def _installed() -> None:
    import atexit

    me = os.getpid()
    if os.environ.get("TORCHCREW_RUN") == "report":
        atexit.register(lambda: _report_line() if os.getpid() == me else None)


def _start_hook() -> None:
    from importlib.util import module_from_spec, spec_from_file_location

    # By path: importing the package by name would need torchcrew in this interpreter, and would import more of it.
    spec = spec_from_file_location("_torchcrew_run_hook", os.path.join(os.path.dirname(_HERE), "run_hook.py"))
    assert spec is not None
    assert spec.loader is not None
    hook = module_from_spec(spec)
    spec.loader.exec_module(hook)
    hook.start(on_failure=lambda error: None, then=_installed)
    if os.environ.get(hook.METHOD_VARIABLE):
        hook.set_default_start_method(os.environ[hook.METHOD_VARIABLE])


def _run_the_next_sitecustomize() -> None:
    from importlib import import_module

    mine = sys.modules.pop("sitecustomize", None)
    try:
        import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        # The import system takes the module it has just run out of sys.modules by name: something must be there.
        if mine is not None:
            sys.modules.setdefault("sitecustomize", mine)


if __name__ == "sitecustomize":
    sys.path[:] = [entry for entry in sys.path if entry != _HERE]
    try:
        if os.environ.get("TORCHCREW_RUN"):
            _start_hook()
    except Exception:
        pass
    _run_the_next_sitecustomize()
