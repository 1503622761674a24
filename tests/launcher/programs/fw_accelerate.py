"""A training as Accelerate's guide has it: nothing of torchcrew is in it."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator()
    set_seed(0)
    inputs = torch.randn(203, 8)  # no multiple of ranks and batches
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
    training = DataLoader(data, batch_size=16, shuffle=True)
    evaluation = DataLoader(data, batch_size=16)
    model, optimizer, training, evaluation, scheduler = accelerator.prepare(
        model, optimizer, training, evaluation, scheduler
    )

    model.train()
    for _ in range(4):
        for batch, labels in training:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()

    model.eval()
    seen = right = 0
    for batch, labels in evaluation:
        with torch.no_grad():
            predictions = model(batch).argmax(dim=-1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        seen += len(labels)
        right += int((predictions == labels).sum())
    accelerator.wait_for_everyone()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    every = accelerator.gather(weights[None])
    accelerator.print(f"{accelerator.num_processes} processes, {accelerator.distributed_type}, seen {seen}")
    accelerator.print(f"accuracy {right / seen:.3f}, the same weights: {bool((every == every[0]).all())}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
