"""Training in two ranks, each with its part of the data and the same model: `DistributedDataParallel`."""

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import torchcrew


def train(inputs, labels, steps):
    device = torchcrew.device()  # this rank's GPU, or the CPU
    mine = slice(torchcrew.rank(), None, torchcrew.world_size())
    inputs, labels = inputs[mine].to(device), labels[mine].to(device)
    model = DistributedDataParallel(torch.nn.Linear(20, 2).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()  # gradients are averaged over the ranks
        optimizer.step()
    return {name: value.cpu() for name, value in model.module.state_dict().items()}


if __name__ == "__main__":
    inputs = torch.randn(1000, 20)
    labels = (inputs.sum(1) > 0).long()
    first, second = torchcrew.launch(train, inputs, labels, steps=50, nprocs=2)
    assert torch.equal(first["weight"], second["weight"])

    model = torch.nn.Linear(20, 2)
    model.load_state_dict(first)
    accuracy = (model(inputs).argmax(1) == labels).float().mean().item()
    assert accuracy > 0.9
    print(f"accuracy {accuracy:.1%}")
