"""`torchcrew.Queue` beside `torch.multiprocessing.Queue`: small and large tensors, round trips, many tensors, idling.

    python -m benchmarks.native_queues [--repeats N]

One producer and one consumer, forked in a new process for every measurement, with one intra-op thread each. Every
message is a tensor that was made before the clock starts and was never sent before, so that stock shares each of them,
as it does in a program that makes what it sends. The consumer looks at the first and the last element of each. Time
runs from the arrival of the last warm-up message to that of the last one. ``cpu_s`` is the CPU time a message of both
processes. The floor of the large ones is a plain copy of the same tensors, by one thread, into as many warm buffers as
messages may wait in the queue.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.multiprocessing

import torchcrew
from benchmarks import harness
from benchmarks.harness import COPY, OURS, STOCK, Claim, Measurement, Row

#: Messages that may wait in the queue of the large ones.
WAITING = 8
#: Untimed messages at the start: the first use of everything, and warm memory for all that waits.
WARM_UP = 3 * WAITING
#: Name -> elements of float32, timed messages.
SIZES = {"4B": (1, 2000), "1KB": (256, 2000), "1MB": (1 << 18, 200), "16MB": (1 << 22, 40)}
ROUND_TRIPS = 1000
MANY, MANY_MESSAGES = 50, 60
IDLE_SECONDS = 2.0
DEADLINE = 120


# In the measuring process ---------------------------------------------------------------------------------------------


def make_queue(engine: str, maxsize: int = 0) -> Any:
    """A queue of one engine."""
    if engine == OURS:
        return torchcrew.Queue(maxsize)
    return torch.multiprocessing.get_context("fork").Queue(maxsize)


def start(target: Callable[..., None], *args: Any) -> Any:
    """A forked process of the standard library."""
    process = multiprocessing.get_context("fork").Process(target=target, args=args, daemon=True)
    process.start()
    return process


def produce(queue: Any, ready: Any, make: Callable[[int], Any], count: int) -> None:
    """Put all messages, then the CPU time from the end of the warm-up on."""
    # Made here: to read what was made before a fork takes twice as long the first time.
    messages = [make(number) for number in range(count)]
    for number, message in enumerate(messages):
        if number == WARM_UP:
            before = time.process_time()
        queue.put(message)
    queue.put(time.process_time() - before)
    ready.wait(DEADLINE)  # stock's messages need their producer


def measure_stream(
    engine: str, make: Callable[[int], Any], timed: int, check: Callable[[Any, int], bool], maxsize: int = 0
) -> Measurement:
    """Messages in a row."""
    queue = make_queue(engine, maxsize)
    ready = multiprocessing.get_context("fork").Event()
    process = start(produce, queue, ready, make, WARM_UP + timed)
    count = -1
    while True:
        got = queue.get(timeout=DEADLINE)
        if type(got) is float:
            break
        count += 1
        if not check(got, count):
            sys.exit(f"{engine}: message {count} is wrong")
        if count == WARM_UP - 1:
            started, before = time.perf_counter(), time.process_time()
        last = time.perf_counter()
    cpu = time.process_time() - before + got
    if count + 1 != WARM_UP + timed:
        sys.exit(f"{engine}: {count + 1} messages came")
    ready.set()
    process.join(DEADLINE)
    return {"message_s": (last - started) / timed, "cpu_s": cpu / timed, "checked": float(count + 1)}


def measure_size(engine: str, name: str) -> Measurement:
    """Tensors of one size."""
    elements, timed = SIZES[name]
    large = elements >= 1 << 18
    if engine == COPY:
        return measure_copy([make_tensor(elements, number) for number in range(WARM_UP + timed)])
    return measure_stream(engine, partial(make_tensor, elements), timed, is_tensor, WAITING if large else 0)


def make_tensor(elements: int, number: int) -> torch.Tensor:
    """The tensor of that number."""
    return torch.full((elements,), float(number))


def is_tensor(got: Any, number: int) -> bool:
    """Whether this is the tensor of that number, as far as its ends tell."""
    return got[0].item() == got[-1].item() == number


def measure_copy(messages: list[torch.Tensor]) -> Measurement:
    """The floor: each tensor copied once into one of the warm buffers."""
    buffers = [torch.ones_like(messages[0]) for _ in range(WAITING)]
    before = time.process_time()
    started = time.perf_counter()
    for number, message in enumerate(messages):
        buffers[number % WAITING].copy_(message)
    seconds = time.perf_counter() - started
    return {"message_s": seconds / len(messages), "cpu_s": (time.process_time() - before) / len(messages)}


def measure_many(engine: str) -> Measurement:
    """Dictionaries of many small tensors."""
    return measure_stream(engine, make_dictionary, MANY_MESSAGES, is_dictionary)


def make_dictionary(number: int) -> dict[str, torch.Tensor]:
    """The dictionary of that number."""
    return {f"key{k}": torch.full((16,), float(number + k)) for k in range(MANY)}


def is_dictionary(got: Any, number: int) -> bool:
    """Whether every tensor is there, and the first and the last are right."""
    return len(got) == MANY and got["key0"][0] == number and got[f"key{MANY - 1}"][15] == number + MANY - 1


def echo(inbox: Any, outbox: Any) -> None:
    """Send back what comes, until None does."""
    while (obj := inbox.get()) is not None:
        outbox.put(obj)


def measure_round_trip(engine: str) -> Measurement:
    """A tensor of 64 bytes there and back."""
    inbox, outbox = make_queue(engine), make_queue(engine)
    process = start(echo, inbox, outbox)
    seconds = []
    for number in range(WARM_UP + ROUND_TRIPS):
        tensor = torch.full((16,), float(number))
        started = time.perf_counter()
        inbox.put(tensor)
        got = outbox.get(timeout=DEADLINE)
        seconds.append(time.perf_counter() - started)
        if got[15].item() != number:
            sys.exit(f"{engine}: round trip {number} brought something else")
    inbox.put(None)
    process.join(DEADLINE)
    timed = seconds[WARM_UP:]
    return {"message_s": sum(timed) / len(timed), "checked": float(len(seconds))}


def measure_idle(engine: str) -> Measurement:
    """CPU time a second of a process that waits for a message."""
    queue, answer = make_queue(engine), make_queue(engine)
    process = start(idle, queue, answer)
    answer.get(timeout=DEADLINE)
    time.sleep(IDLE_SECONDS)
    queue.put(None)
    seconds: float = answer.get(timeout=DEADLINE)
    process.join(DEADLINE)
    return {"idle_s": seconds / IDLE_SECONDS}


def idle(queue: Any, answer: Any) -> None:
    """Wait once; say how much CPU time that took."""
    answer.put("ready")
    before = time.process_time()
    queue.get()
    answer.put(time.process_time() - before)


MEASURES: dict[str, Callable[[str], Measurement]] = {
    **{name: partial(measure_size, name=name) for name in SIZES},
    "many": measure_many,
    "round_trip": measure_round_trip,
    "idle": measure_idle,
}


# In the process that is started ---------------------------------------------------------------------------------------


def run(engine: str, key: str) -> Measurement:
    """One measurement in a process of its own."""
    return harness.run_child("benchmarks.native_queues", engine, key, timeout=2 * DEADLINE)


def add(bench: harness.Benchmark, key: str, work: str, claims: list[Claim], floor: str | None = None) -> None:
    """Measure one row."""
    engines = [STOCK, OURS, *([floor] if floor else [])]
    measured = harness.alternate({engine: partial(run, engine, key) for engine in engines}, bench.repeats)
    checked = {engine: sum(one.pop("checked", 0.0) for one in measured[engine]) for engine in (STOCK, OURS)}
    metric = "idle_s" if key == "idle" else "message_s"
    per = "second" if key == "idle" else "message"
    more = {"messages_checked": checked}
    if key in SIZES:
        more["message_bytes"] = {name: 4.0 * elements for name, (elements, _) in SIZES.items() if name == key}
    bench.add(Row(key, f"`torchcrew.Queue`, {work}", metric, per, measured, claims, floor, more=more))


def main() -> None:
    bench = harness.Benchmark("native_queues", str(__doc__))
    for key in ("4B", "1KB"):
        claims = [Claim("at least 20 times faster than stock", at_least=20)]
        add(bench, key, f"tensor of {key}", claims)
    for key in ("1MB", "16MB"):
        claims = [
            Claim("at least 5 times faster than stock", at_least=5),
            Claim("at least 75 % of a plain copy", COPY, at_least=0.75),
        ]
        add(bench, key, f"tensor of {key}", claims, COPY)
    add(bench, "many", f"dict of {MANY} small tensors", [Claim("at least 30 times faster than stock", at_least=30)])
    add(bench, "round_trip", "64 bytes there and back", [Claim("at least 20 times faster than stock", at_least=20)])
    add(bench, "idle", "CPU time of a waiting consumer", [Claim("at most 1 % of a core", at_most=0.01)])
    bench.finish()


if __name__ == "__main__":
    if "--child" in sys.argv:
        torch.set_num_threads(1)
        print(json.dumps(MEASURES[sys.argv[3]](sys.argv[2])))
    else:
        main()
