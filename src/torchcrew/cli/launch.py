"""`torchcrew launch`: a script or module in several ranks, by torchrun's flags.

    torchcrew launch -n 4 train.py ARGS
      │  zygote started at once: it imports torch while this process reads its arguments, and never imports it itself
      └► launch(Script(...))  ─► rank 0..3: train.py is their __main__
    torchcrew launch --nnodes 2 --rdzv-endpoint HOST:PORT ...   the same on each of several machines: launcher.nodes

Exit: 0 when all ranks ended well. Else the failed rank's own status (128 + n where signal n ended it), after one report
of the first failure; 130 after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import sys
import tempfile
import traceback
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from torchcrew.crew import program as crew_program
from torchcrew.crew import zygote
from torchcrew.crew.cpus import usable_cores
from torchcrew.crew.foresight import imports_of_program
from torchcrew.crew.program import ProgramNotFound, find_script, without_our_frames
from torchcrew.errors import RankDied, RankFailed, TorchcrewError
from torchcrew.launcher import script as launcher_script
from torchcrew.launcher.options import Options
from torchcrew.launcher.script import Script, ScriptFailed

if TYPE_CHECKING:
    from torchcrew.launcher.nodes import Nodes

__all__ = ("CONTEXT_SETTINGS", "launch_command")

CONTEXT_SETTINGS = {
    "allow_interspersed_args": False,
    # torchrun takes each of its flags in both spellings.
    "token_normalize_func": lambda name: name.replace("_", "-"),
}
"""Options after the script belong to the script: the command has to be registered with these settings."""

#: torchrun's, for the static rendezvous.
MASTER_ADDRESS, MASTER_PORT = "127.0.0.1", 29500
#: What a crew has its zygote import, so that it need not be replaced when the crew asks for it.
MEMBER = "torchcrew.launcher.member"
#: A frame of a traceback in text, with the lines of source and marks below it, of a file that calls the script.
_FILES = "|".join(re.escape(str(module.__file__)) for module in (crew_program, launcher_script))
_OUR_FRAME = re.compile(rf'^  File "(?:{_FILES})", .*\n(?:    .*\n)*', re.MULTILINE)
#: What an error of `Options` begins with, and which option that is here.
_OPTION_OF = {"nprocs": "--nproc-per-node", "restarts": "--max-restarts"}
_STREAMS = re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*")
_replaced: list[ModuleType] = []  # the command's own __main__: its globals are in use until the process ends


def launch_command(
    program: Annotated[
        str | None, typer.Argument(metavar="SCRIPT", help="The script, or the module with -m.", show_default=False)
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="The program's own arguments.", show_default=False)
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="Run a module by its name, as python -m does.")
    ] = False,
    nproc: Annotated[
        str,
        typer.Option(
            "-n",
            "--nproc",
            "--nproc-per-node",
            metavar="N",
            help="Ranks on this machine: a number, gpu (one for each), cpu (one for each usable core), or auto: gpu "
            "where there are any, else cpu.",
        ),
    ] = "auto",
    threads_per_rank: Annotated[
        str, typer.Option(metavar="N", help="Threads of each rank. auto: the usable cores, divided by the ranks.")
    ] = "auto",
    backend: Annotated[
        str, typer.Option(metavar="NAME", help="Of the process group. auto: nccl for GPUs, else crew.")
    ] = "auto",
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="End the job when no rank makes progress for so long.", show_default=False
        ),
    ] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="How often all ranks are started anew after a failure.")] = 0,
    start_method: Annotated[str, typer.Option(metavar="METHOD", help="zygote, spawn, fork or forkserver.")] = "zygote",
    logs: Annotated[
        str | None,
        typer.Option(
            metavar="prefix|none",
            help="prefix: each line of output begins with its rank; none: it does not. Without this: prefix where "
            "there are several ranks.",
            show_default=False,
        ),
    ] = None,
    log_dir: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Put output into files: rank0.log, ...", show_default=False)
    ] = None,
    tee: Annotated[
        str,
        typer.Option(
            "-t",
            "--tee",
            metavar="STD",
            help="Accepted without effect: output goes to the terminal, with ranks, or into files, but not to both.",
        ),
    ] = "0",
    redirects: Annotated[
        str,
        typer.Option(
            "-r",
            "--redirects",
            metavar="STD",
            help="0: none. 1, 2, 3 (torchrun's for stdout, stderr, both), or that for ranks (0:1,1:3): all output of "
            "all ranks goes into files, of --log-dir or a new folder.",
        ),
    ] = "0",
    nnodes: Annotated[str, typer.Option(metavar="N", help="Machines, or MIN:MAX of them.")] = "1",
    node_rank: Annotated[
        int | None,
        typer.Option(min=0, help="This machine's number among them (static rendezvous).", show_default=False),
    ] = None,
    rdzv_endpoint: Annotated[
        str, typer.Option(metavar="HOST[:PORT]", help="Where the machines meet, the same on all.", show_default=False)
    ] = "",
    rdzv_backend: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="c10d or static; static where --node-rank or --master-addr is given.",
            show_default=False,
        ),
    ] = None,
    rdzv_id: Annotated[str, typer.Option(metavar="ID", help="The job, the same on all machines.")] = "none",
    rdzv_conf: Annotated[
        str, typer.Option(metavar="K=V,...", help="More for the rendezvous, as torchrun's.", show_default=False)
    ] = "",
    local_addr: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="By which the others reach this machine.", show_default=False),
    ] = None,
    master_addr: Annotated[
        str | None, typer.Option(metavar="HOST", help="The machine of node rank 0 (static).", show_default=False)
    ] = None,
    master_port: Annotated[
        int | None, typer.Option(metavar="PORT", help="Its port (static).", show_default=False)
    ] = None,
    standalone: Annotated[bool, typer.Option("--standalone", help="One machine, as without --nnodes.")] = False,
    without_effect: Annotated[
        str | None,
        typer.Option(
            "--role", "--monitor-interval", metavar="VALUE", help="Accepted without effect.", show_default=False
        ),
    ] = None,
    not_python: Annotated[bool, typer.Option("--no-python", "--run-path", hidden=True)] = False,
) -> None:
    """Run a script or module in several ranks, which `torch.distributed` finds ready as under torchrun.

    Everything after the script's name belongs to the script:  torchcrew launch -n 4 train.py --epochs 2

    On several machines, give the same command on each. Their ports are torch.distributed's, which anybody who reaches
    them can use: they should be in a network of their own.
    """
    sys.excepthook = sys.__excepthook__  # typer's own would show errors in another form
    if not_python:
        raise typer.BadParameter(
            "--no-python and --run-path are not supported: ranks run a Python script, or a module with -m"
        )
    least, most = _range(nnodes)
    if standalone and most > 1:
        raise typer.BadParameter("--standalone is for one machine, but --nnodes says several")
    for name, value in {"--tee": tee, "--redirects": redirects}.items():
        if not _STREAMS.fullmatch(value):
            raise typer.BadParameter(f"{name} is {value!r}, but should be 0, 1, 2 or 3, or that for ranks: 0:1,1:3")
    if logs not in (None, "prefix", "none"):
        raise typer.BadParameter(f"--logs is {logs!r}, but should be prefix or none; --log-dir puts output into files")
    options = _options(
        nprocs=_ranks(nproc),
        backend=None if backend == "none" else backend,
        threads_per_rank="auto" if threads_per_rank == "auto" else _number("--threads-per-rank", threads_per_rank),
        timeout=timeout,
        start_method=start_method,
        restarts=max_restarts,
    )
    nodes = None
    if most > 1:
        backend_of_rdzv = rdzv_backend or ("c10d" if node_rank is None and master_addr is None else "static")
        endpoint = rdzv_endpoint
        if not endpoint and backend_of_rdzv == "static":
            endpoint = f"{master_addr or MASTER_ADDRESS}:{master_port or MASTER_PORT}"
        nodes = _nodes(least, most, endpoint, backend_of_rdzv, rdzv_id, node_rank or 0, local_addr, _pairs(rdzv_conf))
    script = _script(program, arguments or [], module)
    _be_nobodys_main()
    if start_method == "zygote" and nodes is None:
        # It imports torch while this process still reads its own modules.
        zygote.preload(MEMBER, *imports_of_program(script.name, module))
        zygote.warm()
    several = most > 1 or options.ranks() > 1
    _run(script, replace(options, logs=_logs(logs, log_dir, redirects, tee, several)), nodes)


# What the flags mean --------------------------------------------------------------------------------------------------


def _ranks(text: str) -> int | Literal["auto"]:
    """``--nproc-per-node``: as torchrun's, but that "cpu" is what this process may use of them."""
    if text == "auto":
        return "auto"
    if text == "cpu":
        return max(1, math.floor(usable_cores()))
    if text == "gpu":
        from torch.cuda import device_count

        if not device_count():
            raise typer.BadParameter("--nproc-per-node is gpu, but torch sees no GPU here")
        return device_count()
    return _number("--nproc-per-node", text, "a number, auto, gpu or cpu")


def _number(name: str, text: str, what: str = "a number or auto") -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{name} is {text!r}, but should be {what}") from None


def _options(**values: Any) -> Options:
    try:
        return Options(**values)
    except (TypeError, ValueError) as error:
        name, _, text = str(error).partition(" ")
        option = _OPTION_OF.get(name, f"--{name.replace('_', '-')}")
        raise typer.BadParameter(f"{option} {text.replace(', or None', '').replace('None', 'none')}") from None


def _range(nnodes: str) -> tuple[int, int]:
    """``--nnodes``: N or MIN:MAX."""
    least, _, most = nnodes.partition(":")
    found = _number("--nnodes", least, "N or MIN:MAX"), _number("--nnodes", most or least, "N or MIN:MAX")
    if not 1 <= found[0] <= found[1]:
        raise typer.BadParameter(f"--nnodes is {nnodes!r}, but should be N or MIN:MAX with 1 <= MIN <= MAX")
    return found


def _pairs(text: str) -> dict[str, str]:
    """``--rdzv-conf``: K=V,K=V."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    if not all(key.strip() and equals for key, equals, _ in pairs):
        raise typer.BadParameter(f"--rdzv-conf is {text!r}, but should be KEY=VALUE,KEY=VALUE")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _nodes(
    least: int,
    most: int,
    endpoint: str,
    backend: str,
    run_id: str,
    rank: int,
    address: str | None,
    config: dict[str, str],
) -> Nodes:
    from torchcrew.launcher.nodes import Nodes

    if not endpoint:
        raise typer.BadParameter(
            "several machines need a place to meet: --rdzv-endpoint HOST:PORT, the same on each, where HOST is one of "
            "them; or --node-rank and --master-addr"
        )
    try:
        nodes = Nodes(least, most, endpoint, backend, run_id, rank if backend == "static" else None, address, config)
        nodes.port  # noqa: B018 - checks the endpoint
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return nodes


def _asks_for_streams(std: str) -> bool:
    """Whether a value of --tee or --redirects names any stream of any rank."""
    return any(part.rpartition(":")[2] != "0" for part in std.split(","))


def _logs(logs: str | None, log_dir: str | None, redirects: str, tee: str, several: bool) -> str | None:
    """Where output goes: files if they are asked for, else the terminal."""
    if log_dir is None and _asks_for_streams(redirects):
        log_dir = tempfile.mkdtemp(prefix="torchcrew-logs-")
        _say(f"output goes to files in {log_dir}")
    if log_dir is not None:
        if _asks_for_streams(tee):
            _say("--tee has no effect: output goes to files")
        return log_dir
    return "prefix" if logs == "prefix" or (logs is None and several) else None


def _script(program: str | None, arguments: list[str], module: bool) -> Script:
    """What the ranks run; a script that is not there or no Python is told now, once, and not by each of them."""
    if not program:
        _refuse("say which script or module: torchcrew launch [OPTIONS] SCRIPT [ARGS]..., or -m MODULE", 2)
    if program == "-":
        _refuse("a program on standard input ('-') cannot be run: several ranks could not read it", 2)
    if not module:
        try:
            find_script(program)
        except ProgramNotFound as error:
            _refuse(str(error), error.status)
        except Exception as error:
            trace = without_our_frames(error.__traceback__, __file__)
            sys.excepthook(type(error), error.with_traceback(trace), trace)
            raise SystemExit(1) from None
    return Script(program, tuple(arguments), module)


def _be_nobodys_main() -> None:
    """Have the ranks import no `__main__`: it is this command's, which they have no use for."""
    _replaced.append(sys.modules["__main__"])
    sys.modules["__main__"] = ModuleType("__main__")


# Running --------------------------------------------------------------------------------------------------------------


def _run(script: Script, options: Options, nodes: Nodes | None) -> NoReturn:
    """Run the ranks to their end, and leave with the status that says how that was."""
    try:
        if nodes is None:
            _launch(script, options)
        else:
            from torchcrew.launcher.nodes import launch_on_nodes

            launch_on_nodes(nodes, options, script)
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception as error:
        if type(error).__name__ == "SignalException":  # elastic's, of a signal that this process got
            raise SystemExit(128 + int(error.sigval)) from None  # type: ignore[attr-defined]
        _say(_explanation(error))
        raise SystemExit(_status(error)) from None
    raise SystemExit(0)


def _launch(script: Script, options: Options) -> None:
    from torchcrew.launcher.group import AGENT
    from torchcrew.launcher.launching import launch

    # Whoever says --nproc wants ranks to be started, also in a task of SLURM that `launch` would make one of them.
    os.environ[AGENT] = "1"
    launch(
        script,
        nprocs=options.nprocs,
        backend=options.backend,
        threads_per_rank=options.threads_per_rank,
        timeout=options.timeout,
        start_method=options.start_method,
        restarts=options.restarts,
        logs=options.logs,
    )


def _explanation(error: Exception) -> str:
    """An error's text: of a rank's what that one says, without frames of ours."""
    failed = error if isinstance(error, TorchcrewError) else error.__cause__
    if not isinstance(failed, TorchcrewError):
        return "".join(traceback.format_exception(error)).rstrip()
    if isinstance(error, ScriptFailed) and isinstance(failed, RankFailed):
        lines = "".join(f"\n  | {line}" for line in failed.stderr)
        return f"rank {failed.rank} (pid {failed.pid} on {failed.host}): {error}{lines}"
    return _OUR_FRAME.sub("", str(failed)).rstrip()


def _status(error: Exception) -> int:
    """The exit status for an error: the rank's own, as a shell would give it."""
    if isinstance(error, ScriptFailed):
        return error.status
    if isinstance(error, RankDied) and error.exitcode:
        return error.exitcode if error.exitcode > 0 else 128 - error.exitcode
    return 1


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.write(f"torchcrew launch: {text}\n")
        sys.stderr.flush()


def _refuse(message: str, status: int) -> NoReturn:
    _say(message)
    raise SystemExit(status)
