"""One tensor in shared memory; each rank adds to its own row."""

import torch

import torchcrew.multiprocessing as mp


def add_to_row(rank: int, tensor: torch.Tensor) -> None:
    tensor[rank] += rank + 1


def main() -> None:
    tensor = torch.zeros(4, 4).share_memory_()
    processes = [mp.Process(target=add_to_row, args=(rank, tensor)) for rank in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print("rows:", tensor[:, 0].tolist())


if __name__ == "__main__":
    main()
