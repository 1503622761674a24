"""Shared numbers, changed by many processes without losing a change."""

import torchcrew.multiprocessing as mp


def count(counter, histogram):
    for step in range(1_000):
        counter.update(lambda n: n + 1)
        histogram.update(step % 4, lambda n: n + 1)


if __name__ == "__main__":
    counter, histogram = mp.Value("i", 0), mp.Array("i", 4)
    processes = [mp.Process(target=count, args=(counter, histogram)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print(counter.value, histogram[:])
    assert counter.value == 4_000
    assert histogram[:] == [1_000] * 4
