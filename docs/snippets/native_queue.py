"""A queue of snapshots: what arrives is the consumer's own, whatever becomes of the producer."""

import torch

import torchcrew


def produce(queue: torchcrew.Queue, count: int) -> None:
    batch = torch.empty(100_000)
    for number in range(count):
        batch.fill_(number)  # the same memory every time: what was put is a copy
        queue.put({"number": number, "batch": batch})
    queue.close()  # for all: what was put is still delivered, then iteration ends


if __name__ == "__main__":
    queue = torchcrew.Queue(maxsize=4)
    producer = torchcrew.multiprocessing.Process(target=produce, args=(queue, 10))
    producer.start()

    kept = [message["batch"][:3] for message in queue]  # views may be kept, and written
    producer.join()
    assert [view[0].item() for view in kept] == list(range(10))
    kept[7] += 1
    print("still mine:", kept[7].tolist())
