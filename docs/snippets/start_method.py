"""Processes with spawn's semantics, forked in milliseconds from one that has torch and this script imported."""

import os

import torch

import torchcrew.multiprocessing as mp


def report(rank):
    print(rank, os.environ["CUDA_VISIBLE_DEVICES"], torch.ones(2).sum().item(), flush=True)


if __name__ == "__main__":
    mp.set_start_method("zygote")  # or "spawn", by its old name
    for rank in range(2):
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)  # what the child finds when it imports
        process = mp.Process(target=report, args=(rank,))
        process.start()
        process.join()
