"""Ranks that stay: what is dear to make is made once, and used by many calls."""

import torch

import torchcrew


def prepare(crew, size):
    crew.local.matrix = torch.eye(size, device=torchcrew.device()) * (torchcrew.rank() + 1)


def multiply(crew, vector):
    return (crew.local.matrix @ vector.to(torchcrew.device())).sum().item()


if __name__ == "__main__":
    with torchcrew.Crew(2) as crew:
        crew.run(prepare, crew, 500)
        for k in range(3):
            print(crew.run(multiply, crew, torch.full((500,), float(k))))
