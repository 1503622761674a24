"""The command ``torchcrew``: its subcommands and nothing else.

A subcommand is a function ``<name>_command`` of the module ``torchcrew.cli.<name>``, which may declare the settings of
its context as ``CONTEXT_SETTINGS``. The module is imported when the subcommand is called, so that ``torchcrew --help``
needs neither torch nor the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer

from torchcrew import __version__

__all__ = ("COMMANDS", "app", "main")

#: Subcommand -> its line in ``torchcrew --help``.
COMMANDS = {
    "run": "Run an unmodified script or module with torchcrew under its DataLoaders and processes.",
    "launch": "Run a script or module in several ranks, by torchrun's flags.",
    "stacks": "Print the Python stacks of a running program's processes, and what its ranks wait for.",
    "demo": "Train a small network on real images, with stock's DataLoader and with ours, and compare.",
    "doctor": "Say what matters for multiprocessing on this machine, and what to do about it.",
}

app = typer.Typer(
    name="torchcrew",
    help="Efficient multiprocessing for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a program's own errors shall look like Python's
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def _main(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Show the version."),
) -> None:
    """Efficient multiprocessing for PyTorch."""


def _register(name: str, summary: str) -> None:
    """Add a subcommand that hands all its arguments, ``--help`` too, to the real one."""
    settings: dict[str, Any] = {
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": [],
    }
    app.command(name, help=summary, context_settings=settings)(_lazily(name))


def _lazily(name: str) -> Callable[[typer.Context], None]:
    def call(ctx: typer.Context) -> None:
        module = import_module(f"torchcrew.cli.{name}")
        real = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        real.command(name, context_settings=getattr(module, "CONTEXT_SETTINGS", None))(
            getattr(module, f"{name}_command")
        )
        command = typer.main.get_command(real)
        # Not standalone: usage errors pass to the outer command, which shows them; an exit code comes back as a value.
        status = command.main(args=ctx.args, prog_name=f"torchcrew {name}", standalone_mode=False)
        if isinstance(status, int):
            raise typer.Exit(status)

    return call


for _name, _summary in COMMANDS.items():
    _register(_name, _summary)


def main() -> None:
    """Run the command line, and end the process with its status."""
    app(prog_name="torchcrew")
