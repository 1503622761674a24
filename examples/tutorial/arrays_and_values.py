"""Four processes double the same element of an array: with `update`, no doubling is lost."""

import torchcrew.multiprocessing as mp


def double(array, index) -> None:
    array.update(index, lambda element: element * 2)


def main() -> None:
    array = mp.Array("d", [1.0, 2.0, 3.0])
    index = mp.Value("i", 1)
    processes = [mp.Process(target=double, args=(array, index)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print("array:", array[:])  # 2.0 doubled four times
    array[index] *= 2  # a Value is an index; alone like this, nobody can come in between
    print("once more:", array[index])


if __name__ == "__main__":
    main()
