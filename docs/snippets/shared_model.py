"""Several processes train one model, whose parameters lie in memory that all of them see."""

import torch
from torch.nn.functional import cross_entropy

import torchcrew.multiprocessing as mp  # was: import torch.multiprocessing as mp


def train(rank, model, inputs, labels):
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        batch = torch.randint(len(inputs), (32,))
        optimizer.zero_grad()
        cross_entropy(model(inputs[batch]), labels[batch]).backward()
        optimizer.step()  # without a lock: what two processes write at the same time, one of them may lose


if __name__ == "__main__":
    mp.set_start_method("spawn")
    inputs = torch.randn(640, 20)
    labels = (inputs[:, 0] > 0).long()
    model = torch.nn.Linear(20, 2)
    model.share_memory()

    processes = [mp.Process(target=train, args=(rank, model, inputs, labels)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0, process

    accuracy = (model(inputs).argmax(1) == labels).float().mean().item()
    assert accuracy > 0.9
    print("what two processes learned is here:", model.weight.is_shared())
