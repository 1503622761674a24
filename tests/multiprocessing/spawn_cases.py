"""What the ranks of `test_spawn.py` and `test_rendezvous.py` run: importable by name in every process."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


class Odd(BaseException):
    """No `Exception`, so that nobody who catches those sees it."""


def end(how: str) -> None:
    """End, or fail, in one of several ways."""
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))
        time.sleep(60)
    elif how.startswith("exit "):
        sys.exit(int(how[5:]))
    elif how == "text":
        sys.exit("a text")
    elif how.startswith("_exit "):
        os._exit(int(how[6:]))
    elif how == "raise":
        raise ValueError("on purpose")
    elif how == "chain":
        try:
            end("raise")
        except ValueError as error:
            raise RuntimeError("after it") from error
    elif how == "interrupt":
        raise KeyboardInterrupt
    elif how == "odd":
        raise Odd("odd")
    elif how == "surrogates":
        raise ValueError("\udcff")
    elif how == "at exit":
        atexit.register(os._exit, 5)
    elif how == "native":
        import ctypes

        ctypes.CDLL(None).abort()


def first_ends(index: int, how: str, seconds: float = 60.0) -> None:
    """Rank 0 ends so; the others sleep."""
    if index == 0:
        end(how)
    else:
        time.sleep(seconds)


def return_index(index: int, queue: Any) -> None:
    queue.put(index)


def nothing(*_: Any) -> None:
    """Return at once."""


def sleep(_: int, seconds: float) -> None:
    time.sleep(seconds)


def ignore_sigterm(index: int, ready: str, native: bool) -> None:
    """Rank 0 fails once rank 1 is where no Python signal handler runs, or ignores the signal."""
    if index == 0:
        while not os.path.exists(ready):
            time.sleep(0.005)
        raise ValueError("on purpose")
    signal.signal(signal.SIGTERM, lambda *_: None)
    Path(ready).touch()
    if native:
        import ctypes

        ctypes.PyDLL(None).sleep(60)  # the interpreter's lock is kept
    while True:
        time.sleep(1)


class UnpicklableThere:
    """Ends the process that unpickles it, or fails there."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        return end, (self.how,)


def reset_then_cause(index: int, cause: str, directory: str) -> None:
    """Rank 0 notices that rank 1 is gone, and ends, before rank 1 has ended itself."""
    noticed = Path(directory) / "noticed"
    if index == 0:
        try:
            raise ConnectionResetError("Connection reset by peer")
        finally:
            noticed.touch()
    while not noticed.exists():
        time.sleep(0.005)
    time.sleep(0.1)
    end(cause)


def both_fail(index: int, directory: str) -> None:
    """Rank 1 fails first but takes long to exit; rank 0 fails later and exits at once."""
    failed = Path(directory) / "failed"
    if index == 1:
        atexit.register(time.sleep, 30)
        failed.touch()
        raise ValueError("first")
    while not failed.exists():
        time.sleep(0.005)
    time.sleep(0.2)
    raise ValueError("second")


def use_gpu(index: int, how: str) -> None:
    """What the tutorials do with their rank."""
    import torch

    if how == "to":
        torch.zeros(1).to(index)
    elif how == "to name":
        torch.zeros(1).to(f"cuda:{index}")
    elif how == "cuda":
        torch.nn.Linear(1, 1).cuda(index)
    elif how == "cuda ()":
        torch.nn.Linear(1, 1).cuda()
    elif how == "set_device":
        torch.cuda.set_device(index)
    elif how == "nccl":
        torch.distributed.init_process_group("nccl", rank=index, world_size=1)
    elif how == "load":
        import io

        file = io.BytesIO()
        storage = torch.save(torch.zeros(1), file)
        assert storage is None
        file.seek(0)
        torch.load(file, map_location=f"cuda:{index}")
    elif how == "ddp":
        torch.distributed.init_process_group("gloo", rank=index, world_size=1)
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1), device_ids=[index])


def report_device(index: int, queue: Any) -> None:
    import torchcrew
    from torchcrew.crew import rank

    queue.put((index, str(torchcrew.device()), rank.current()))


class Trainer:
    """A class whose method ranks run."""

    def __init__(self, value: int) -> None:
        self.value = value

    def run(self, index: int, queue: Any) -> None:
        queue.put((index, self.value))
