"""Programs that begin in a copy of a Python that has imported torch, which is most of what a short program costs."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

#: Reads one job a line, forks, and tells the exit code. The copy goes on as `python PATH ARGUMENTS` would: `__main__`
#: is the program's, it ends as an interpreter does, and nothing of torchcrew is imported.
SERVER = """
import json, os, sys, types
import torch
for line in sys.stdin:
    job = json.loads(line)
    pid = os.fork()
    if pid == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()
for fd, path, flags in ((0, os.devnull, os.O_RDONLY), (1, job["out"], os.O_WRONLY), (2, job["err"], os.O_WRONLY)):
    opened = os.open(path, flags)
    os.dup2(opened, fd)
    os.close(opened)
os.environ.update(job["environment"])
sys.argv = job["argv"]
sys.path[0] = os.path.dirname(sys.argv[0])
program = types.ModuleType("__main__")
program.__file__ = sys.argv[0]
sys.modules["__main__"] = program
with open(sys.argv[0]) as file:
    text = file.read()
exec(compile(text, sys.argv[0], "exec"), program.__dict__)
"""


class WarmPython:
    """Runs programs one after the other; made by `warm_python`."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self.server = server

    def run(
        self, path: Path, *arguments: str, timeout: float = 50, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end, with these variables in addition (libraries that are loaded have read theirs)."""
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        argv = [str(path), *arguments]
        with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
            job: dict[str, Any] = {"argv": argv, "out": out.name, "err": err.name, "environment": environment}
            self.server.stdin.write(json.dumps(job) + "\n")
            self.server.stdin.flush()
            if not select.select([self.server.stdout], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(argv, timeout, out.read(), err.read())
            code = int(self.server.stdout.readline())
            return subprocess.CompletedProcess(argv, code, out.read(), err.read())


@contextlib.contextmanager
def warm_python(*options: str, env: Mapping[str, str] | None = None) -> Iterator[WarmPython]:
    """A Python that has been started with these options, in this environment, for the fixture of a module."""
    server = subprocess.Popen(
        [sys.executable, *options, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )
    with server:
        try:
            yield WarmPython(server)
            assert server.stdin is not None
            server.stdin.close()
            server.wait(10)
        finally:
            if server.poll() is None:  # a program has not come to its end
                os.killpg(server.pid, signal.SIGKILL)
