"""`nn.DataParallel` in each process, on a machine with or without GPUs; results come back through a queue."""

import torch
from torch import nn

import torchcrew
import torchcrew.multiprocessing as mp


def infer(rank: int, x: torch.Tensor, results) -> None:
    device = torchcrew.device()
    torch.manual_seed(0)
    model = nn.DataParallel(nn.Linear(10, 2).to(device))
    with torch.no_grad():
        results.put((rank, model(x.to(device)).cpu()))


def main() -> None:
    x = torch.ones(8, 10)
    results = mp.Queue()
    processes = [mp.Process(target=infer, args=(rank, x, results)) for rank in range(4)]
    for process in processes:
        process.start()
    outputs = dict(results.get() for _ in processes)
    for process in processes:
        process.join()
    print("ranks:", sorted(outputs))
    print("the same model gave the same answer:", all(torch.equal(outputs[0], output) for output in outputs.values()))


if __name__ == "__main__":
    main()
