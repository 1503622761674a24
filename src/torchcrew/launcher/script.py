"""What a rank of ``torchcrew launch`` runs: a script or module, as python would run it."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass

from torchcrew.crew.program import ProgramNotFound, execute, find_module, find_script

__all__ = ("Script", "ScriptFailed")


class ScriptFailed(Exception):
    """A script ended, without an exception that would say why, in a way that is not success."""

    def __init__(self, message: str, status: int) -> None:
        """Say what it said and with which exit status it ended."""
        super().__init__(message, status)
        self.message = message
        self.status = status

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Script:
    """A script or module with its arguments; calling it runs it as the `__main__` of the calling process.

    That `__main__` stays when the call has returned, so that processes which were started by the script can import it
    again. It is meant to be called once in a process.
    """

    name: str
    """A file, a folder or an archive; or the name of a module."""
    arguments: tuple[str, ...] = ()
    """``sys.argv[1:]``."""
    module: bool = False
    """Whether `name` is that of a module, as with ``python -m``."""

    def __call__(self) -> None:
        """Run it to its end, and wait for its threads as the interpreter does.

        Raises:
            ScriptFailed: it is not there, or it ended by `sys.exit` with a status other than 0.
            BaseException: whatever else it raises.
        """
        try:
            program = find_module(self.name) if self.module else find_script(self.name)
            execute(program, list(self.arguments))
        except ProgramNotFound as error:
            raise ScriptFailed(str(error), error.status) from None
        except SystemExit as error:
            failure = _failure(error)
            if failure is not None:
                raise failure from None
        finally:
            _join_threads()
            _flush()


def _failure(error: SystemExit) -> ScriptFailed | None:
    """What `sys.exit` meant, by the interpreter's rules; None for success."""
    code = error.code
    if code is None or code == 0:
        return None
    if isinstance(code, int):
        status = code & 0xFF  # what a parent process would see
        return ScriptFailed(f"the script ended by sys.exit({code})", status) if status else None
    return ScriptFailed(str(code), 1)


def _join_threads() -> None:
    """Wait for the threads that are no daemons: one may be writing the checkpoint."""
    for thread in threading.enumerate():
        if not thread.daemon and thread not in (threading.current_thread(), threading.main_thread()):
            thread.join()


def _flush() -> None:
    # A pipe whose reader has gone, or a stream that the script has closed: nobody is left to be told.
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
