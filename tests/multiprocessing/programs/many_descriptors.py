"""More shared tensors than descriptors, on the producer's and on the consumer's side."""

from __future__ import annotations

import os
import resource
from typing import Any

import torch

import torchcrew.multiprocessing as mp
from torchcrew.errors import TooManyDescriptors
from torchcrew.multiprocessing import queues

SOFT, HARD = 64, 256


def give(queue: Any, number: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * HARD, 2 * HARD))
    for index in range(number):
        queue.put(torch.full((3,), index))
    queue.put([torch.full((3,), index) for index in range(number)])
    queue.put("last")


def main() -> None:
    context = mp.get_context("fork")
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, 2 * HARD))
    queue, other = queues.Queue(ctx=context), queues.Queue(ctx=context)
    process = context.Process(target=give, args=(queue, HARD))
    process.start()
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, HARD))

    held, said = [], set()
    for index in range(HARD):
        try:
            held.append((index, queue.get()))
        except TooManyDescriptors as error:
            said.add(str(error))
    assert len(held) > SOFT, "the soft limit was not raised"
    assert said, "there cannot be so many descriptors"
    assert all("every shared tensor keeps one" in text for text in said)
    assert all((tensor == index).all() for index, tensor in held)
    try:
        queue.get()
    except TooManyDescriptors:
        pass
    else:
        raise AssertionError("a message with more descriptors than there are")
    process.join()

    refused = None
    sent = [torch.zeros(2) for _ in range(HARD)]
    for tensor in sent:
        try:
            other.put(tensor)
        except TooManyDescriptors as error:
            refused = error
    assert refused is not None, "there cannot be so many descriptors"
    held.clear()
    sent.clear()
    del tensor
    assert queue.get() == "last"
    while not other.empty():
        other.get()
    other.put(torch.ones(4))
    assert other.get().sum() == 4
    assert len(os.listdir("/proc/self/fd")) < SOFT


if __name__ == "__main__":
    main()
