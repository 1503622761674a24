"""A training as Lightning Fabric's guide has it: nothing of torchcrew is in it."""

import torch
from lightning_fabric import Fabric, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    seed_everything(0, verbose=False)
    inputs = torch.randn(203, 8)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    with fabric.init_module():
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = fabric.setup(model, optimizer)
    training = fabric.setup_dataloaders(DataLoader(data, batch_size=16, shuffle=True))

    model.train()
    for epoch in range(4):
        training.sampler.set_epoch(epoch)
        for batch, labels in training:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), labels)
            fabric.backward(loss)
            optimizer.step()

    with torch.no_grad():
        right = (model(inputs).argmax(dim=-1) == data.tensors[1]).float().mean()
    every_loss = fabric.all_gather(loss.detach())
    every = fabric.all_gather(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    fabric.barrier()
    fabric.print(f"{fabric.world_size} processes, {len(every_loss)} losses, first is {fabric.is_global_zero}")
    fabric.print(f"accuracy {fabric.all_reduce(right):.3f}, the same weights: {bool((every == every[0]).all())}")


if __name__ == "__main__":
    main()
