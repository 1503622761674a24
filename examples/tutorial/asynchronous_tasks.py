"""Four tasks that take a second each, at the same time: about one second in all."""

import time

import torchcrew.multiprocessing as mp


def wait(task: int) -> None:
    time.sleep(1)
    print(f"task {task} is done", flush=True)


def main() -> None:
    began = time.perf_counter()
    processes = [mp.Process(target=wait, args=(task,)) for task in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print(f"all done in {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
