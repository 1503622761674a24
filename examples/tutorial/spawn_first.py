"""`set_start_method("spawn")` first: a parent that has used its threads starts workers, and nothing deadlocks."""

import torch

import torchcrew.multiprocessing as mp


def multiply(rank: int, results) -> None:
    a = torch.ones(400, 400)
    results.put((rank, (a @ a).sum().item()))  # as many threads as the parent used


def main() -> None:
    mp.set_start_method("spawn")
    a = torch.ones(400, 400)
    expected = (a @ a).sum().item()  # starts this process's threads
    results = mp.Queue()
    processes = [mp.Process(target=multiply, args=(rank, results)) for rank in range(4)]
    for process in processes:
        process.start()
    sums = dict(results.get() for _ in processes)
    for process in processes:
        process.join()
    print("right:", sums == dict.fromkeys(range(4), expected))


if __name__ == "__main__":
    main()
