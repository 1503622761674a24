"""A training process in the state that the variable STATE names; prints its workers' pids and waits to be killed.

Run from a copy of this text (`tests.crew.programs.running`); the test kills it and looks what is left.
"""

import ctypes
import json
import os
import subprocess
import threading
import time

import torch

from tests.data.survival import Rows
from torchcrew.data import DataLoader


def say(value) -> None:
    os.write(1, (json.dumps(value) + "\n").encode())


class Asks(Rows):
    """Sample 4 does what the state says."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 4:
            if STATE == "gil":
                open("in_native_code", "w").close()
                ctypes.PyDLL(None).sleep(60)
            elif STATE == "subprocess":
                say_later(subprocess.Popen(["sleep", "60"]).pid)
                time.sleep(60)
            elif STATE == "stopped worker":
                os.kill(os.getpid(), 19)
            elif STATE == "busy":
                while True:
                    pass
        return super().__getitem__(index)


def say_later(pid: int) -> None:
    with open("subprocess.pid.new", "w") as file:
        file.write(str(pid))
    os.rename("subprocess.pid.new", "subprocess.pid")


def wait_for(name: str) -> str:
    deadline = time.monotonic() + 10
    while not os.path.exists(name):
        assert time.monotonic() < deadline, name
        time.sleep(0.01)
    with open(name) as file:
        return file.read()


STATE = os.environ["STATE"]
OPTIONS = {
    "back-pressure": {"prefetch_factor": 40},
    "no room": {"prefetch_factor": 20, "memory_budget": "1MB"},
    "idle": {"persistent_workers": True},
    "spawned": {"multiprocessing_context": "spawn"},
    "zygote": {"multiprocessing_context": "zygote"},
}


def main() -> None:
    elements = 3000 if STATE == "back-pressure" else 20_000  # the former travels inline and fills the socket
    loader = DataLoader(Asks(400, elements), num_workers=2, **OPTIONS.get(STATE, {}))
    if STATE == "from a thread":
        kept = []
        thread = threading.Thread(target=lambda: kept.append(iter(loader)))
        thread.start()
        thread.join()
        iterator = kept[0]
    else:
        iterator = iter(loader)
    first = next(iterator)
    extra = []
    if STATE == "idle":
        for _ in iterator:
            pass
    elif STATE == "gil":
        wait_for("in_native_code")
    elif STATE == "subprocess":
        extra = [int(wait_for("subprocess.pid"))]
    elif STATE in ("back-pressure", "no room"):
        time.sleep(0.7)
    elif STATE == "stray fork":
        stray = ctypes.PyDLL(None).fork()  # past Python's hooks: it keeps every descriptor
        if stray == 0:
            os.setsid()
            time.sleep(60)
            os._exit(0)
        say([stray])
    elif STATE in ("stopped worker", "busy"):
        time.sleep(0.3)
    inodes = [os.stat(arena.mapping.fd).st_ino for arena in iterator._transport._arenas]
    say([worker.pid for worker in iterator._workers] + extra)
    say(inodes)
    time.sleep(60)
    del first


if __name__ == "__main__":
    main()
