"""Kill producers and consumers of one queue at random instants: ``queue_kills.py KIND KILLS SEED``.

KIND is "Queue", "bounded", "JoinableQueue" or "SimpleQueue". Three producers, three consumers; who is killed gets a
successor. A consumer checks every byte and reports what it received through another queue. In the end the
producers say how much they sent, and everything must have been received, once and in order, but for at most one
message for each consumer that was killed. (Reports never wait in a backlog, which is lost with its process.) Prints
what came of it.
"""

from __future__ import annotations

import collections
import gc
import json
import os
import random
import signal
import sys
import time
import warnings
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

import torchcrew.multiprocessing as mp

CONTEXT: Any = mp.get_context("fork")
DEADLINE = 20.0
AHEAD = 100


def message(producer: int, number: int) -> Any:
    """What message ``number`` of a producer is: inline, large, one or more tensors."""
    value = producer * 1000 + number
    kind = number % 6
    if kind == 0:
        return torch.full((3,), value)
    if kind == 1:
        return b"%d " % value * 20_000
    if kind == 2:
        return [torch.full((2000,), value), {"same": torch.full((1,), value)}, "x" * 100]
    if kind == 3:
        return torch.full((30_000,), value)
    return value


def check(got: Any, producer: int, number: int) -> None:
    """Raise unless every byte is right."""
    wanted = message(producer, number)
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(got, wanted), (producer, number)
    elif isinstance(wanted, list):
        assert torch.equal(got[0], wanted[0])
        assert torch.equal(got[1]["same"], wanted[1]["same"])
        assert got[2] == wanted[2]
    else:
        assert got == wanted, (producer, number)


def produce(queue: Any, reports: Any, stop: torch.Tensor, producer: int) -> None:
    number = 0
    while not stop[0]:
        queue.put((producer, number, message(producer, number)))
        number += 1
        while hasattr(queue, "qsize") and queue.qsize() > AHEAD:
            time.sleep(1e-4)
    reports.put(("sent", producer, number))


def consume(queue: Any, reports: Any, consumer: int) -> None:
    while True:
        item = queue.get()
        if item is None:
            return
        producer, number, got = item
        check(got, producer, number)
        reports.put(("received", consumer, (producer, number)))
        if hasattr(queue, "task_done"):
            queue.task_done()


class Run:
    """One queue and its processes."""

    def __init__(self, kind: str, draw: random.Random) -> None:
        name = "Queue" if kind == "bounded" else kind
        self.queue = CONTEXT.Queue(5) if kind == "bounded" else getattr(CONTEXT, name)()
        self.reports = CONTEXT.Queue(5) if kind == "bounded" else CONTEXT.SimpleQueue()
        self.stop = torch.zeros(1, dtype=torch.bool).share_memory_()
        self.draw = draw
        self.numbers = iter(range(1_000_000))
        self.producers: dict[int, Any] = {}
        self.consumers: dict[int, Any] = {}
        self.killed = {"producers": 0, "consumers": 0}
        self.sent: dict[int, int] = {}
        self.received: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
        self.last = time.monotonic()

    def fill_up(self) -> None:
        """Start who is missing."""
        for group, target, extra in (
            (self.producers, produce, (self.stop,)),
            (self.consumers, consume, ()),
        ):
            while len(group) < 3:
                number = next(self.numbers)
                args = (self.queue, self.reports, *extra, number)
                group[number] = CONTEXT.Process(target=target, args=args)
                group[number].start()

    def kill_one(self) -> None:
        """Kill any of them."""
        kind = self.draw.choice(("producers", "consumers"))
        group = getattr(self, kind)
        process = group.pop(self.draw.choice(list(group)))
        os.kill(process.pid, signal.SIGKILL)
        process.join(DEADLINE)
        assert process.exitcode == -signal.SIGKILL, f"one of the {kind} ended by itself: {process.exitcode}"
        process.close()
        self.killed[kind] += 1

    def take_reports(self, seconds: float) -> bool:
        """Read what comes in so much time; whether anything did."""
        end, any_came = time.monotonic() + seconds, False
        while connection.wait([self.reports._reader], max(0.0, end - time.monotonic())):
            what, who, facts = self.reports.get()
            if what == "sent":
                self.sent[who] = facts
            else:
                self.received[who, facts[0]].append(facts[1])
            any_came, self.last = True, time.monotonic()
            if time.monotonic() > end:
                break
        assert time.monotonic() - self.last < DEADLINE, "nothing moves any more"
        return any_came

    def finish(self) -> None:
        """Let everybody come to an end."""
        self.stop[0] = True
        while len(self.sent) < len(self.producers):
            self.take_reports(0.05)
        self.reap(self.producers)
        if hasattr(self.queue, "join") and not self.killed["consumers"]:
            self.queue.join()
        for _ in self.consumers:
            self.queue.put(None)
        waiting = list(self.consumers.values())
        while any(process.is_alive() for process in waiting):
            self.take_reports(0.01)
        self.reap(self.consumers)
        while self.take_reports(0.0):
            pass

    def reap(self, group: dict[int, Any]) -> None:
        for process in group.values():
            while process.is_alive():
                self.take_reports(0.01)
            process.join()
            assert process.exitcode == 0, process.exitcode
            process.close()

    def judge(self) -> dict[str, Any]:
        """Raise unless what was received is what was sent."""
        by_producer = collections.defaultdict(list)
        for (_, producer), numbers in self.received.items():
            assert numbers == sorted(numbers), f"a consumer received the messages of {producer} in another order"
            by_producer[producer] += numbers
        missing = 0
        for producer, numbers in by_producer.items():
            assert len(numbers) == len(set(numbers)), f"a message of {producer} was received twice"
            missing += self.sent.get(producer, max(numbers) + 1) - len(numbers)
        for producer, count in self.sent.items():
            assert not count or producer in by_producer or self.killed["consumers"]
        assert missing <= self.killed["consumers"], f"{missing} messages are missing"
        return {"received": sum(map(len, by_producer.values())), "missing": missing, **self.killed}


def main(kind: str, kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # each death is told
    draw = random.Random(seed)
    warmed = Run(kind, draw)
    warmed.fill_up()
    warmed.finish()
    del warmed
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    run = Run(kind, draw)
    for _ in range(kills):
        run.fill_up()
        run.take_reports(draw.choice([0.001, 0.01, 0.05]) * draw.random())
        run.kill_one()
    run.fill_up()
    run.finish()
    told = run.judge()
    del run
    gc.collect()
    left = len(os.listdir("/proc/self/fd")) - descriptors
    assert left <= 0, f"{left} descriptors are left"
    maps = Path("/proc/self/maps").read_text()
    assert "torchcrew" not in maps, "memory is left"
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
