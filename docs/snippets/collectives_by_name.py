"""A process group by its name, in processes that are started in any way."""

import tempfile

import torch
import torch.distributed as dist

import torchcrew.multiprocessing as mp


def work(rank, path):
    dist.init_process_group("crew", init_method=f"file://{path}", rank=rank, world_size=2)
    numbers = torch.arange(4) + rank
    dist.all_reduce(numbers)
    assert numbers.tolist() == [1, 3, 5, 7]
    small = dist.new_group([0, 1], backend="gloo")  # beside it, whatever torch has
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=small)
    if rank == 0:
        print(numbers, "by", dist.get_backend())
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (f"{folder}/store",), nprocs=2)
