"""A pool whose worker is killed in the middle of a task: that task is an error, the others are done."""

import os
import signal

import torch

import torchcrew.multiprocessing as mp


def work(k):
    if k == 2:
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
    return torch.full((2,), float(k))


if __name__ == "__main__":
    with mp.get_context("zygote").Pool(2) as pool:
        results = [pool.apply_async(work, (k,)) for k in range(4)]
        for k, result in enumerate(results):
            try:
                print(k, result.get().tolist())
            except RuntimeError as error:
                print(k, type(error).__name__)
