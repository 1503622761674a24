"""Epoch after epoch; prints descriptors and memory as they develop. ``soak.py EPOCHS [persistent] [spawn]``."""

import gc
import json
import os
import sys

from tests.data.survival import Rows, check
from torchcrew.data import DataLoader

SIZE, LENGTH = 4, 64


def resident() -> int:
    """Private memory of this process, in bytes (what it shares with the workers is the arenas' business)."""
    with open("/proc/self/smaps_rollup") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line and not line[0].isdigit())
    return sum(int(fields[name].split()[0]) for name in ("Private_Dirty", "Private_Clean")) * 1024


def shared() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssShmem"))


def address_space() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmSize"))


def main(epochs: int, *options: str) -> None:
    loader = DataLoader(Rows(LENGTH), batch_size=SIZE, num_workers=2, persistent_workers="persistent" in options)
    told = []
    held = []
    for epoch in range(epochs):
        for number, batch in enumerate(loader):
            check(batch, number, SIZE)
            if "holding" in options and number % 5 == epoch % 5:
                held.append(batch)
            del batch
        del held[:-8]
        if epoch % max(1, epochs // 30) == 0 or epoch == epochs - 1:
            gc.collect()
            told.append([len(os.listdir("/proc/self/fd")), resident(), shared(), address_space()])
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
