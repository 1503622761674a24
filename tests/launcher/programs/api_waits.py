"""Two ranks of which one waits for the other, which waits for a file."""

from __future__ import annotations

import sys

import torch.distributed as dist

import torchcrew
from tests.launcher import launch_cases as cases


def wait(path: str) -> str:
    """Rank 0 in a collective, rank 1 elsewhere."""
    dist.barrier()
    if torchcrew.rank() == 0:
        print("both run", flush=True)
    seen = cases.wait_for(path) if torchcrew.rank() == 1 else "waited"
    dist.barrier()
    return seen


if __name__ == "__main__":
    print(torchcrew.launch(wait, sys.argv[1], nprocs=2))
