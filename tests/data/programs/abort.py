"""A worker aborts with RLIMIT_CORE unlimited while 480 MB are held; prints the seconds until the error came."""

import os
import resource
import sys
import time

import torch

from tests.data.survival import MB, Rows
from torchcrew.data import DataLoader

LAST = 12


class Aborts(Rows):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == LAST:
            time.sleep(0.3)  # the user has received everything before this
            with open("aborted_at", "w") as file:
                file.write(str(time.monotonic()))
            os.abort()
        return super().__getitem__(index)


def main() -> None:
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    held = []
    try:
        for batch in DataLoader(Aborts(16, 40 * MB // 4), num_workers=1):
            held.append(batch)  # noqa: PERF402 - the loop ends with an exception
    except RuntimeError as error:
        with open("aborted_at") as file:
            seconds = time.monotonic() - float(file.read())
        # Which of stock's two texts it is depends on whether its handler or its poll was first.
        assert "DataLoader worker" in str(error), error  # noqa: PT017 - this is no test
    assert len(held) == LAST, len(held)
    sys.stdout.write(f"{seconds:.3f}\n")


if __name__ == "__main__":
    main()
