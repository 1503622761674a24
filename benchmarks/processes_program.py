"""The program that `benchmarks.processes` starts.

    python -m benchmarks.processes_program --child WORK ENGINE START_METHOD

Spawned children import this module, so it imports no more than it needs.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

import torch
from torch import nn

PROCESSES, STEPS = 4, 10


def nothing() -> None:
    assert torch.__version__


def train(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def start_one(mp: Any) -> None:
    process = mp.Process(target=nothing)
    process.start()
    process.join()
    assert process.exitcode == 0


def train_shared_model(mp: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(100, 10)
    y = x @ torch.ones(10, 1)
    model = nn.Linear(10, 1)
    model.share_memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    before = nn.functional.mse_loss(model(x), y).item()
    processes = [mp.Process(target=train, args=(rank, model, optimizer, x, y)) for rank in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * PROCESSES
    assert nn.functional.mse_loss(model(x), y).item() < before / 100


def main() -> None:
    work, engine, method = sys.argv[2:]
    mp = importlib.import_module({"stock": "torch.multiprocessing", "torchcrew": "torchcrew.multiprocessing"}[engine])
    context = mp.get_context(method)
    run = {"start": start_one, "train": train_shared_model}[work]
    result = {}
    for moment in ("cold", "warm"):
        started = time.perf_counter()
        run(context)
        result[f"{moment}_s"] = time.perf_counter() - started
    print(json.dumps(result))


if __name__ == "__main__":
    main()
