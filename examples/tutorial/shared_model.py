"""One model in shared memory, trained by four processes at once without a lock (Hogwild).

Each process builds its own optimizer over the same parameters: what one writes, the others see.

    python shared_model.py [fork|spawn|zygote]
"""

import sys

import torch
from torch import nn

import torchcrew.multiprocessing as mp

STEPS, PROCESSES = 10, 4


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(100, 10, generator=generator)
    return x, x @ torch.ones(10, 1)


def train(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    print(f"rank {rank} made {STEPS} steps", flush=True)


def main() -> None:
    if len(sys.argv) > 1:
        mp.set_start_method(sys.argv[1])
    torch.manual_seed(0)
    x, y = make_data()
    model = nn.Linear(10, 1)
    model.share_memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with torch.no_grad():
        before = nn.functional.mse_loss(model(x), y).item()

    processes = [mp.Process(target=train, args=(rank, model, optimizer, x, y)) for rank in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit(f"exit codes: {[process.exitcode for process in processes]}")

    with torch.no_grad():
        after = nn.functional.mse_loss(model(x), y).item()
    print(f"loss before {before:.2f}, after {after:.4f}")


if __name__ == "__main__":
    main()
