"""`torchcrew stacks PID`: where every process of a program is, in Python, and what its ranks wait for."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from torchcrew.launcher import program_report

__all__ = ("stacks_command",)


def stacks_command(
    pid: Annotated[int, typer.Argument(min=1, help="Any process of the program.", metavar="PID")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the stacks of each process as JSON.")] = False,
) -> None:
    """Print the Python stacks of a running program's processes, equal ones together; of ranks, who waits for whom.

    Loader workers, pools and ranks are asked, and anything else that torchcrew has started. They go on undisturbed.
    Where PID has started several programs, as a shell has, these are listed instead.
    """
    try:
        text = (
            json.dumps([asdict(answer) for answer in program_report.answers(pid)], indent=1)
            if as_json
            else program_report.report(pid)
        )
    except (ProcessLookupError, PermissionError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    typer.echo(text)
