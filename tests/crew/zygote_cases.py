"""What the processes of `test_zygote.py` run: importable by their name in every process."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from multiprocessing import current_process, parent_process
from multiprocessing import util as multiprocessing_util
from typing import Any


def report(queue: Any) -> None:
    """Send what a process can see of how it was started."""
    import torch

    parent = parent_process()
    assert parent is not None
    main = sys.modules["__main__"]
    queue.put(
        {
            # readline sets two in C only, where os.environ does not see them.
            "environment": {name: value for name, value in os.environ.items() if name not in ("_", "LINES", "COLUMNS")},
            "cwd": os.getcwd(),
            "argv": sys.argv,
            "path": sys.path,
            "umask": os.umask(0o22),
            "affinity": sorted(os.sched_getaffinity(0)),
            "nofile": resource.getrlimit(resource.RLIMIT_NOFILE),
            "core": resource.getrlimit(resource.RLIMIT_CORE),
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
            "main": main.__name__,
            "main is __mp_main__": sys.modules.get("__mp_main__") is main,
            "daemon": current_process().daemon,
            "name": current_process().name,
            "authkey": bytes(current_process().authkey),
            "parent": (parent.name, parent.pid, parent.is_alive()),
            "stdin": sys.stdin.read(),
            "stdin file": os.readlink("/proc/self/fd/0"),
            "stdout file": os.readlink("/proc/self/fd/1"),
            "line buffering": (sys.stdout.line_buffering, sys.stderr.line_buffering),
            "signals": [
                str(signal.getsignal(number))
                for number in (
                    signal.SIGINT,
                    signal.SIGTERM,
                    signal.SIGHUP,
                    signal.SIGCHLD,
                    signal.SIGUSR1,
                    signal.SIGPIPE,
                )
            ],
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            "threads": torch.get_num_threads(),
            "interpreter": (str(sys.flags), sys.warnoptions, sys._xoptions),
            "finalizers": len(multiprocessing_util._finalizer_registry),  # type: ignore[attr-defined]
        }
    )


def exit_by(how: str) -> None:
    """End in one of several ways."""
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))
        time.sleep(60)
    elif how == "raise":
        raise ValueError("on purpose")
    elif how == "text":
        sys.exit("a text")
    elif how == "_exit":
        os._exit(9)
    elif how != "return":
        sys.exit(None if how == "None" else int(how))


def nothing(*_: Any) -> None:
    """Return at once."""


def put(queue: Any, value: Any) -> None:
    queue.put(value)


def echo(connection: Any, held: Any) -> None:
    """Send back what one of several kinds of things holds."""
    if hasattr(held, "recv") and hasattr(held, "getsockname"):
        connection.send(held.recv(100))
    elif hasattr(held, "recv"):
        connection.send(held.recv())
    elif hasattr(held, "tolist"):
        connection.send(held.tolist())
        held[0] = -1
    else:
        connection.send(held)
    connection.close()


def use_primitives(lock: Any, event: Any, semaphore: Any, condition: Any, barrier: Any, value: Any, array: Any) -> None:
    """Take part in everything a context makes."""
    with lock:
        value.value += 1
    semaphore.release()
    barrier.wait(10)
    with condition:
        condition.notify_all()
    array[0] = 7
    event.set()


def random_numbers(queue: Any) -> None:
    import random

    import numpy as np
    import torch

    queue.put((random.random(), float(np.random.rand()), float(torch.rand(()))))


def matmul(queue: Any) -> None:
    """Use both thread pools."""
    import numpy as np
    import torch

    torch.ones(1500, 1500) @ torch.ones(1500, 1500)
    (torch.ones(3000, 3000) + 1).exp_()
    np.ones((900, 900)) @ np.ones((900, 900))
    queue.put(torch.get_num_threads())


def start_another(queue: Any) -> None:
    """A process started from the zygote starts processes itself, in both ways."""
    import multiprocessing

    process = multiprocessing.Process(target=put, args=(queue, multiprocessing.get_start_method()))
    process.start()
    process.join(30)
    stock = multiprocessing.get_context("spawn").Process(target=nothing)
    stock.start()
    stock.join(30)
    queue.put((process.exitcode, stock.exitcode))
