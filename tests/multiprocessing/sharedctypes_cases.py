"""What the tests of `Value`, `Array`, their lock and their memory run, importable in every process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

#: Longer than any wait here can take unless something hangs, in seconds.
PATIENCE = 10.0


def run(ctx: Any, function: Callable[..., None], *args: Any, exitcode: int = 0) -> None:
    """Run a function in a process to its end."""
    process = ctx.Process(target=function, args=args)
    process.start()
    finish(process, exitcode=exitcode)


def finish(*processes: Any, exitcode: int = 0) -> None:
    """Wait for the ends of processes; kills what does not end."""
    for process in processes:
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()
    codes = []
    for process in processes:
        process.join()
        codes.append(process.exitcode)
        process.close()
    assert codes == [exitcode] * len(codes)


def shared_descriptors() -> int:
    """How many descriptors of the memory under test are open here."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum("torchcrew-values" in target for target in targets)


def outcome(function: Callable[[], Any]) -> Any:
    """What a call returns, or the type and text of what it raises."""
    try:
        return function()
    except Exception as error:
        return type(error), str(error)


def in_thread(function: Callable[[], Any]) -> Any:
    """What a function returns in another thread."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(outcome(function)))
    thread.start()
    thread.join(PATIENCE)
    return results[0]


def add_one(value: Any) -> None:
    """Add one."""
    value.update(lambda old: old + 1)


def kill_me() -> None:
    """SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


def hold_for_ever(lock: Any, held: Any) -> None:
    """Until killed."""
    with lock:
        held.set()
        time.sleep(PATIENCE * 3)
