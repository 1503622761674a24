"""A tensor in a queue becomes shared: both sides see the same memory, also when its producer has ended."""

import torch

import torchcrew.multiprocessing as mp


def produce(queue):
    queue.put(torch.arange(4))  # put, and exit


if __name__ == "__main__":
    queue = mp.Queue()
    process = mp.Process(target=produce, args=(queue,))
    process.start()
    process.join()
    tensor = queue.get()
    print(tensor, tensor.is_shared())
