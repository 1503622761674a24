"""A rank is killed, as the kernel does it when memory runs out; the others wait for it in a collective."""

import os
import signal
import sys
import tempfile

import torch.distributed as dist

import torchcrew


def work():
    if torchcrew.rank() == 1:
        print("batch 42 does not fit", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        try:
            torchcrew.launch(work, nprocs=2, logs=folder)
        except torchcrew.errors.RankDied as error:
            print(error)
            print((error.rank, error.signal, error.stderr))
