"""Tensors that are shared are reduced where they lie; all others are copied through, and stay where they are."""

import time

import numpy as np
import torch
import torch.distributed as dist

import torchcrew


def milliseconds(tensor):
    times = []
    for _ in range(10):  # the first time, each rank maps the other's memory
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        times.append((time.perf_counter() - began) * 1e3)
    return min(times)


def work():
    ordinary = torch.ones(5_000_000)
    shared = torchcrew.share(ordinary)  # or ordinary.share_memory_()
    times = milliseconds(ordinary), milliseconds(shared)
    assert torch.equal(ordinary, shared)

    array = np.full(3, 1.0 + torchcrew.rank())
    dist.all_reduce(torch.from_numpy(array))  # its memory is numpy's, and has not moved
    assert array.tolist() == [3.0, 3.0, 3.0]
    return times


if __name__ == "__main__":
    times = torchcrew.launch(work, nprocs=2, backend="crew")
    print("20 MB in {:.1f} ms; shared, in {:.1f} ms".format(*times[0]))
