"""A model whose parameters are cut up among the ranks: FSDP2's `fully_shard`."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

import torchcrew


def train(inputs, targets, steps):
    device = torchcrew.device()  # this rank's GPU, or the CPU
    mine = slice(torchcrew.rank(), None, torchcrew.world_size())
    inputs, targets = inputs[mine].to(device), targets[mine].to(device)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1)).to(device)
    mesh = init_device_mesh(device.type, (torchcrew.world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)  # gathered before it computes, its gradients summed and scattered after it
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return loss.item(), sum(parameter.to_local().numel() for parameter in model.parameters())


if __name__ == "__main__":
    inputs = torch.randn(400, 20)
    targets = inputs[:, :1] - inputs[:, 1:2]
    ranks = torchcrew.launch(train, inputs, targets, 60, nprocs=2)
    assert max(loss for loss, _ in ranks) < 0.1
    print("parameters in each rank:", *(count for _, count in ranks))
