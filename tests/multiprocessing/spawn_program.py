"""Run every scenario of `test_spawn.py` with one implementation, and print what could be seen of each.

python spawn_program.py stock|ours START_METHOD
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import resource
import sys
import warnings
from typing import Any

from tests.multiprocessing import spawn_cases as cases

HOWS = (
    *("return", "raise", "chain", "odd", "interrupt", "text", "at exit", "surrogates", "native"),
    *(f"exit {code}" for code in (0, 1, 2, 3, 255)),
    *("_exit 0", "_exit 7", "SIGKILL", "SIGSEGV", "SIGTERM", "SIGINT", "SIGUSR1"),
)


class Lines(logging.Handler):
    """Keeps the log's lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.name} {record.levelname} {record.getMessage()}")


def visible(text: str) -> str:
    """A text without what differs between two runs: pids, and the frames of a traceback."""
    return re.sub(r"\b\d{3,}\b", "PID", re.sub(r'(  File "[^\n]*\n(    [^\n]*\n)*)+', "FRAMES\n", text))


def observe(mp: Any, method: str, how: str) -> dict[str, Any]:
    """Run a scenario with two ranks, of which the first ends so and the other is alive then, if that is a failure."""
    handler = Lines()
    logging.getLogger().addHandler(handler)
    logging.getLogger("torch.multiprocessing").setLevel(logging.INFO)
    seen: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fails = how not in ("return", "interrupt", "exit 0", "_exit 0", "SIGINT")
        context = mp.start_processes(
            cases.first_ends, (how, 60.0 if fails else 0.2), nprocs=2, join=False, start_method=method
        )
        assert context.pids() == [process.pid for process in context.processes]
        assert list(context.sentinels.values()) == [0, 1]
        try:
            while not context.join(20, None):
                pass
            seen["returned"] = [context.join(), context.join(0)]
        except Exception as error:
            seen["type"] = type(error).__name__
            seen["text"] = visible(str(error))
            # What else it carries.
            seen["values"] = [getattr(error, name, None) for name in ("error_index", "exit_code", "signal_name")]
            seen["pid"] = error.error_pid == context.pids()[0]  # type: ignore[attr-defined]
            seen["pickled"] = str(error.__reduce__()[1][1:2])
        seen["again"] = [join_again(context) for _ in range(2)]
    logging.getLogger().removeHandler(handler)
    seen["codes"] = [process.exitcode for process in context.processes]
    seen["log"] = [visible(line) for line in handler.lines]
    seen["left"] = len(multiprocessing.active_children())
    seen["warnings"] = [str(warning.message) for warning in caught if issubclass(warning.category, FutureWarning)]
    return seen


def join_again(context: Any) -> str:
    """What a further `join` says when all is over."""
    try:
        return str(context.join(20))
    except Exception as error:
        return visible(str(error))


def main(which: str, method: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if which == "stock":
        import torch.multiprocessing as mp
    else:
        import torchcrew.multiprocessing as mp  # type: ignore[no-redef]
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.stdout.write(
        json.dumps({how: observe(mp, method, how) for how in HOWS if how != "at exit" or method != "fork"})
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
