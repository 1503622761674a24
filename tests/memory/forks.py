"""Forked children that tests hold alive and end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

__all__ = ("Child",)

DEADLINE = 10.0


class Child:
    """A forked child that runs ``work`` (its result is its exit status) and then lives until it is told to end."""

    def __init__(self, work: Callable[[], int | None] = lambda: 0) -> None:
        told, self._tell = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 99
            try:
                signal.alarm(60)  # whatever happens to the test
                os.close(self._tell)
                os.read(told, 1)
                status = work() or 0
            finally:
                os._exit(status)
        os.close(told)

    def end(self) -> int:
        """Let it do its work and end; returns the exit code."""
        if self._tell >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._tell, b"x")
            os.close(self._tell)
            self._tell = -1
        return self._reap()

    def kill(self) -> int:
        """End it by SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)
        os.close(self._tell)
        self._tell = -1
        return self._reap()

    def _reap(self) -> int:
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.001)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError(f"child {self.pid} did not end")
