"""Training with gloo and with crew, which `launch` takes by itself on a CPU: the weights are the same bits."""

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import torchcrew


def train(inputs, targets, steps):
    mine = slice(torchcrew.rank(), None, torchcrew.world_size())
    torch.manual_seed(0)
    layers = torch.nn.Linear(20, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        mse_loss(model(inputs[mine]), targets[mine]).backward()  # gradients are averaged in shared memory
        optimizer.step()
    return dist.get_backend(), model.module.state_dict()


if __name__ == "__main__":
    inputs = torch.randn(400, 20)
    targets = inputs.square().mean(1, keepdim=True)
    ours, gloo = (torchcrew.launch(train, inputs, targets, 20, nprocs=2, backend=name) for name in ("crew", "gloo"))
    for _, weights in ours + gloo:
        assert all(torch.equal(weights[name], value) for name, value in ours[0][1].items())
    print("the weights of", ours[0][0], "and", gloo[0][0], "are equal, bit for bit")
