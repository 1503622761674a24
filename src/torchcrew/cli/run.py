"""`torchcrew run`: a script or module as python would run it, with ours under its DataLoaders and processes.

    torchcrew run train.py ARGS
      │  environment: TORCHCREW_RUN, run_site first on PYTHONPATH   ─► child interpreters: the same hook (run_site)
      │  import hook: torch imported? → torchcrew.data.install(),   ─► forked children: have it already
      │                                 torchcrew.multiprocessing.install.install()
      │  exec train.py as __main__, in this process and thread (signals, stdin, pdb and profilers work as ever)
      └► the program's atexit functions, then the report on stderr

How children are reached: a spawned worker, the forkserver, torchrun's ranks and a ``subprocess`` call of Python all
start a fresh interpreter, and all of them pass the environment on. So the hook travels as a `sitecustomize` on
PYTHONPATH (which then runs the environment's own one). Wrapping ``multiprocessing.spawn.get_preparation_data`` would
reach multiprocessing's children only, and would patch the interpreter; a ``.pth`` file would act on every program of
the environment. A child with ``python -I``/``-E``, or with another PYTHONPATH, simply runs on stock's engine.

Exit: what the program raised is shown by ``sys.excepthook`` without frames of ours; the status is python's, and after
Ctrl-C the process ends by SIGINT, as python does, so that shells and supervisors see it.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from typing import Annotated, NoReturn

import typer

from torchcrew.cli import run_hook
from torchcrew.crew.program import Program, ProgramNotFound, execute, find_module, find_script, without_our_frames

__all__ = ("CONTEXT_SETTINGS", "run_command")

CONTEXT_SETTINGS = {"allow_interspersed_args": False}
"""Options after the script belong to the script: the command has to be registered with these settings."""

_SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "run_site")


def run_command(
    program: Annotated[
        str | None, typer.Argument(metavar="SCRIPT", help="The script, or the module with -m.", show_default=False)
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="The program's own arguments.", show_default=False)
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="Run a module by its name, as python -m does.")] = False,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Say at exit where the time went.")] = True,
    start_method: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help="How processes are started where the program does not say: fork, spawn, forkserver or zygote.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run an unmodified script or module with torchcrew under its DataLoaders and processes, in child processes too.

    Everything after the script's name belongs to the script:  torchcrew run train.py --epochs 2
    """
    if not program:
        _refuse("say which script or module: torchcrew run SCRIPT [ARGS]..., or torchcrew run -m MODULE [ARGS]...", 2)
    if program == "-":
        _refuse("a program on standard input ('-') cannot be run: its worker processes could not import it again", 2)
    _prepare(report, start_method)
    _run(program, arguments or [], module)


def _prepare(report: bool, start_method: str | None) -> None:
    """Make this process and its future children ready; torch is not imported here."""
    if start_method is not None:
        try:
            run_hook.set_default_start_method(start_method)
        except ValueError:
            _refuse(f"--start-method is {start_method!r}, but should be fork, spawn, forkserver or zygote", 2)
        os.environ[run_hook.METHOD_VARIABLE] = start_method
    os.environ[run_hook.RUN_VARIABLE] = "report" if report else "quiet"
    inherited = os.environ.get("PYTHONPATH", "")
    if _SITE not in inherited.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_SITE, inherited)))
    if report:
        atexit.register(_report_at_exit, os.getpid(), time.monotonic())
    run_hook.start(on_failure=_engine_failed)
    sys.excepthook = sys.__excepthook__  # typer's own would show the program's errors in another form


def _run(name: str, arguments: list[str], module: bool) -> None:
    try:
        execute(_find(name, module), arguments)
    except ProgramNotFound as error:
        _refuse(str(error), error.status)
    except SystemExit:
        raise
    except KeyboardInterrupt as error:
        _show(error)
        _end_by_sigint()
    except BaseException as error:
        _show(error)
        raise SystemExit(1) from None


def _find(name: str, module: bool) -> Program:
    try:
        return find_module(name) if module else find_script(name)
    except BaseException:
        atexit.unregister(_report_at_exit)  # no program will run: there is nothing to report
        raise


def _show(error: BaseException) -> None:
    """Print an error as the interpreter would at its end, beginning with the program's first frame."""
    trace = without_our_frames(error.__traceback__, __file__)
    error.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    _flush(sys.stdout)
    sys.excepthook(type(error), error, trace)


def _end_by_sigint() -> NoReturn:
    """Do what the interpreter does after an unhandled KeyboardInterrupt; click would turn it into status 1."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _flush(sys.stdout)
    _flush(sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(128 + signal.SIGINT)  # SIGINT is blocked in this thread


def _flush(stream: object) -> None:
    # A pipe whose reader has gone: nobody is left to be told.
    try:
        stream.flush()  # type: ignore[attr-defined]
    except (OSError, ValueError, AttributeError):
        return


def _refuse(message: str, status: int) -> NoReturn:
    sys.stderr.write(f"torchcrew run: {message}\n")
    raise SystemExit(status)


def _engine_failed(error: Exception) -> None:
    sys.stderr.write(f"torchcrew run: DataLoaders and processes stay stock's: {type(error).__name__}: {error}\n")


def _report_at_exit(pid: int, started: float) -> None:
    """Print the report; registered before the program runs, so after the program's own exit functions."""
    if os.getpid() != pid:  # a child that the program forked by itself and that ended like a program
        return
    wall_s = time.monotonic() - started
    try:
        from rich.console import Console

        from torchcrew.cli.report import run_report

        data = sys.modules.get("torchcrew.data")
        loaders = data.loader_stats() if data is not None and hasattr(data, "loader_stats") else []
        _flush(sys.stdout)
        Console(stderr=True, highlight=False).print(run_report(loaders, wall_s, torch_imported="torch" in sys.modules))
    except Exception as error:
        # The program is over and its exit status stands; a report must not change how it ended.
        sys.stderr.write(f"torchcrew run: no report: {type(error).__name__}: {error}\n")
