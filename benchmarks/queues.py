"""`Queue` of `torchcrew.multiprocessing` against torch's: one producer, one consumer, tensors that become shared.

    python -m benchmarks.queues [--repeats N]

Each run is a program of its own. It forks a producer, which makes every tensor anew and puts it; the program takes it
out, looks at its first and its last element, and lets go of it. Both engines use one thread for torch's own work. Timed
is from the producer's first put to the last get, so whatever runs beside (stock's feeder and its server of descriptors)
is in it. ``cpu_s`` is the CPU time of both processes. The floor of the large tensors is a copy of their bytes.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from functools import partial
from typing import Any

import torch
import torch.multiprocessing

import torchcrew.multiprocessing
from benchmarks import harness
from benchmarks.harness import COPY, OURS, STOCK, Claim, Measurement, Row

#: Key, what, elements (4 bytes each), messages in a run, how many times faster than stock ours has to be.
ROWS = (
    ("tensor_4B", "4 B tensors", 1, 3000, 5),
    ("tensor_1KB", "1 KB tensors", 256, 3000, 5),
    ("tensor_16MB", "16 MB tensors", 4 << 20, 40, 2),
)
ENGINES = {STOCK: torch.multiprocessing, OURS: torchcrew.multiprocessing}


#: Seconds that one run may take.
DEADLINE = 120


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        sys.stdout.write(json.dumps(_measure(sys.argv[2], *map(int, sys.argv[3:]))) + "\n")
        return
    bench = harness.Benchmark("queues", str(__doc__))
    for key, what, elements, messages, target in ROWS:
        engines: dict[str, Any] = {name: partial(_run, name, elements, messages) for name in ENGINES}
        nbytes = 4 * elements
        if large := nbytes > 1 << 20:
            engines[COPY] = lambda nbytes=nbytes: {"message_s": harness.time_copy(nbytes)}
        bench.add(
            Row(
                key=key,
                work=f"`Queue`, {what}, one producer, one consumer",
                metric="message_s",
                per="message",
                measured=harness.alternate(engines, bench.repeats),
                claims=[Claim(f"at least {target} times faster than stock", at_least=target)],
                floor=COPY if large else None,
                notes=["first and last element of every tensor were compared"],
                more={"message_bytes": nbytes},
            )
        )
    bench.finish()


def _run(engine: str, elements: int, messages: int) -> Measurement:
    return harness.run_child("benchmarks.queues", engine, str(elements), str(messages), timeout=DEADLINE)


def _measure(engine: str, elements: int, messages: int) -> Measurement:
    torch.set_num_threads(1)
    context = ENGINES[engine].get_context("fork")
    queue, go, done = context.Queue(), context.SimpleQueue(), context.SimpleQueue()
    producer = context.Process(target=_produce, args=(queue, go, done, elements, messages))
    producer.start()
    assert queue.get() == "ready"
    started, before = time.perf_counter(), _cpu_seconds()
    go.put(None)
    for number in range(messages):
        tensor = queue.get()
        if tensor[0] != number or tensor[-1] != number:
            sys.exit(f"{engine}: message {number} shows other bytes")
    ended, after = time.perf_counter(), _cpu_seconds()
    del tensor
    done.put(None)  # stock's tensors do not survive their producer
    cpu = after - before + queue.get()
    producer.join()
    return {"message_s": (ended - started) / messages, "cpu_s": cpu / messages}


def _produce(queue: Any, go: Any, done: Any, elements: int, messages: int) -> None:
    torch.set_num_threads(1)
    queue.put("ready")
    go.get()
    before = _cpu_seconds()
    for number in range(messages):
        queue.put(torch.full((elements,), float(number)))
    done.get()
    queue.put(_cpu_seconds() - before)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
