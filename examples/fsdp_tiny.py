"""Train a tiny transformer to repeat what it has read, its parameters cut up among the ranks: FSDP2's `fully_shard`.

python examples/fsdp_tiny.py --nproc 2 --steps 60
torchcrew launch -n 2 examples/fsdp_tiny.py
torchrun --nproc-per-node 2 examples/fsdp_tiny.py
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torchcrew

#: Symbols to be repeated, and one that says "now".
SYMBOLS, NOW = 32, 32
#: Of them in a sequence: the model reads 12, then `NOW`, and has to say the 12 again.
LENGTH = 12
WIDTH, HEADS, BLOCKS = 128, 4, 2
#: Sequences of each rank in a step.
BATCH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.queries_keys_values(self.before_attention(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class Transformer(nn.Module):
    """Log-probabilities of the symbols that come after `NOW` and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS + 1, WIDTH)
        self.places = nn.Embedding(2 * LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.out = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.symbols(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.log_softmax(self.out(x[:, LENGTH:]), dim=-1)


@dataclass
class Trained:
    """What each rank returns."""

    losses: list[float]
    """Of each step, the mean of all ranks."""
    accuracy: float
    """Of symbols that were repeated rightly, in sequences that no rank was trained on."""
    kept: int
    """Bytes of parameters and of the optimizer's state in this rank between two steps."""
    whole: int
    """What they would be in one process."""


def shard(model: Transformer, device: torch.device) -> None:
    """Cut each block up among the ranks; it is whole in a rank only while it computes there."""
    mesh = init_device_mesh(device.type, (torchcrew.world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def sequences(generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """What the model reads, and the symbols that it has to say from `NOW` on."""
    symbols = torch.randint(0, SYMBOLS, (BATCH, LENGTH), generator=generator)
    now = torch.full((BATCH, 1), NOW)
    return torch.cat([symbols, now, symbols[:, :-1]], dim=1).to(device), symbols.to(device)


def train(steps: int, terminal: bool = False) -> Trained:
    """Run in every rank."""
    device = torchcrew.device()
    torch.manual_seed(0)  # every rank makes the same model
    model = Transformer().to(device)
    shard(model, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(1 + torchcrew.rank())  # and reads sequences of its own
    screen = Console(stderr=True, force_terminal=terminal or None)
    losses = []
    for _ in track(range(steps), "training", console=screen, disable=torchcrew.rank() > 0):
        tokens, symbols = sequences(data, device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(tokens).flatten(0, 1), symbols.flatten())
        loss.backward()
        optimizer.step()
        losses.append(mean(loss.detach()))
    with torch.no_grad():
        tokens, symbols = sequences(torch.Generator().manual_seed(0), device)
        right = model(tokens).argmax(-1) == symbols
    kept, whole = memory(model, optimizer)
    return Trained(losses, float(right.float().mean()), kept, whole)


def mean(value: Tensor) -> float:
    """Of all ranks."""
    dist.all_reduce(value)
    return float(value) / torchcrew.world_size()


def memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Bytes of parameters and optimizer's state: in this rank, and in all of them."""
    tensors = [*model.parameters()]
    tensors += [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    kept = sum(tensor.to_local().nbytes for tensor in tensors if isinstance(tensor, DTensor))
    return kept, sum(tensor.nbytes for tensor in tensors)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc", type=int, help="ranks; by default one for each GPU, or each core")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    ranks = torchcrew.launch(train, options.steps, sys.stderr.isatty(), nprocs=options.nproc or "auto")
    if torchcrew.rank() == 0:  # where another launcher has started the ranks, each of them is here
        losses = ranks[0].losses
        for step in sorted({0, *range(9, len(losses), 10), len(losses) - 1}):
            print(f"step {step + 1}: loss {losses[step]:.3f}")
        print(f"repeated rightly: {ranks[0].accuracy:.1%}")
        print(f"parameters and optimizer: {ranks[0].whole / 1e6:.2f} MB")
        print("of these, by rank:", *(f"{rank.kept / 1e6:.2f} MB" for rank in ranks))


if __name__ == "__main__":
    main()
