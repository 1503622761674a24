"""Four processes, each told its rank."""

import torchcrew.multiprocessing as mp


def work(rank: int, world_size: int) -> None:
    print(f"rank {rank} of {world_size}", flush=True)


def main() -> None:
    world_size = 4
    processes = [mp.Process(target=work, args=(rank, world_size)) for rank in range(world_size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print("exit codes:", [process.exitcode for process in processes])


if __name__ == "__main__":
    main()
