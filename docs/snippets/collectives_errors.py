"""What the other rank is told when one calls something else, does not come, or dies."""

import os
import signal
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import torchcrew.multiprocessing as mp
from torchcrew.errors import TorchcrewError


def differ(rank, group):
    dist.all_reduce(torch.ones(1000 + rank), group=group)


def stuck(rank, group):
    if rank == 1:
        time.sleep(1.5)  # stands for a disk that does not answer
    dist.all_reduce(torch.ones(1000), group=group)


def die(rank, group):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1000), group=group)


def work(rank, path):
    dist.init_process_group("crew", init_method=f"file://{path}", rank=rank, world_size=2)
    for scene in (differ, stuck, die):
        group = dist.new_group(timeout=timedelta(seconds=0.5))
        try:
            scene(rank, group)
        except TorchcrewError as error:
            if rank == 0:
                print(f"{type(error).__name__}: {error}\n", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        processes = [mp.Process(target=work, args=(rank, f"{folder}/store")) for rank in (0, 1)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        print("exit codes:", *(process.exitcode for process in processes))
