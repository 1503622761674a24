"""Kill random workers at random instants of random loaders. ``random_kills.py KILLS SEED``; prints what came of it.

The instants include the start of the workers, their shutdown, and the pauses between two epochs of persistent ones.
Each run ends with the right batches, all of them, or with one of stock's errors; anything else ends the program.
"""

import json
import os
import random
import re
import signal
import sys
import threading
import time

from tests.data.survival import Rows, check, worker_pids
from torchcrew.crew import guardian
from torchcrew.data import DataLoader

STOCK_ERRORS = re.compile(
    r"DataLoader worker \(pid(\(s\))? ?\d+(, \d+)*\) (exited unexpectedly|is killed by signal: Killed\. ?)"
)
SIZE = 2


class Killer(threading.Thread):
    """Kills one worker, ``wait`` seconds from its start or as soon after that as there is one."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(daemon=True)
        self.draw = draw
        self.wait = draw.choice([0.0, 0.03, 0.1, 0.3]) * draw.random()
        self.killed = 0
        self.ended = threading.Event()

    def run(self) -> None:
        time.sleep(self.wait)
        while not self.ended.is_set():
            pids = worker_pids()
            if pids:
                try:
                    os.kill(self.draw.choice(pids), signal.SIGKILL)
                except ProcessLookupError:
                    continue
                self.killed = 1
                return
            time.sleep(0.0005)


def load(draw: random.Random) -> None:
    """One loader, used in a random way; every batch is compared."""
    epochs = draw.choice([1, 2, 3])
    length = SIZE * draw.choice([4, 20, 60])
    loader = DataLoader(
        Rows(length, seconds=draw.choice([0.0, 0.0, 0.001])),
        batch_size=SIZE,
        num_workers=draw.choice([1, 2, 3]),
        persistent_workers=draw.random() < 0.6,
        prefetch_factor=draw.choice([1, 2, 5]),
    )
    keep = draw.choice([0, 1, 7])
    stop = draw.choice([length, length, length // SIZE // 2])
    for _ in range(epochs):
        held: list = []
        number = -1
        for number, batch in enumerate(loader):
            check(batch, number, SIZE)
            held.append((number, batch))
            del batch, held[: len(held) - keep]
            if number == stop:
                break
        else:
            assert number == length // SIZE - 1, f"only {number + 1} batches"
        for index, batch in held:
            check(batch, index, SIZE)
        time.sleep(draw.choice([0.0, 0.02]))


def main(kills: int, seed: int) -> None:
    for _ in DataLoader(Rows(4), num_workers=1):  # starts the guardian, which is not to be killed
        pass
    assert guardian.pid() is not None
    told = {"kills": 0, "runs": 0, "errors": 0, "complete": 0, "slowest": 0.0}
    while told["kills"] < kills:
        draw = random.Random(f"{seed} {told['runs']}")
        killer = Killer(draw)
        start = time.monotonic()
        try:
            try:
                killer.start()
                load(draw)
            finally:
                killer.ended.set()
        except RuntimeError as error:
            if not STOCK_ERRORS.fullmatch(str(error)) or not killer.killed:
                raise
            told["errors"] += 1
        else:
            told["complete"] += 1
        killer.join(5)
        told["runs"] += 1
        told["kills"] += killer.killed
        told["slowest"] = max(told["slowest"], time.monotonic() - start)
        left = settled(worker_pids)
        assert not left, f"run {told['runs'] - 1}: workers {left} are left"
        descriptors = len(os.listdir("/proc/self/fd"))
        assert descriptors < 60, f"run {told['runs'] - 1}: {descriptors} descriptors"
    sys.stdout.write(json.dumps(told))


def settled(ask) -> list:
    deadline = time.monotonic() + 1.0
    while (found := ask()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
