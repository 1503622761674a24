"""Producers and consumers of one queue, killed at random instants: `queue_storm.py SEED KILLS`

    this process ── forks, kills, forks anew ──► 3 producers ══ queue ══► 3 consumers ── report pipe ──► this process

Every message says which it is in each of its elements. One line of JSON at the end: what was received, and what of it
was wrong. Nothing waits longer than `DEADLINE` for anything; who does has failed.
"""

from __future__ import annotations

import gc
import json
import os
import random
import select
import signal
import struct
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import torchcrew
from torchcrew.errors import QueueClosed

DEADLINE = 10.0
BUDGET = 24 << 20
#: Elements of int64: inline, small and large blocks.
SIZES = (3, 1_000, 10_000, 60_000)
PRODUCERS = CONSUMERS = 3
#: Producer, number of its message; -1: its memory is all free again; -2: an error.
RECORD = struct.Struct("ii")


def produce(queue: Any, me: int, report: int) -> None:
    """Put until the queue is closed; then all memory must come back."""
    draw = random.Random(me)
    number = 0
    while True:
        size = draw.choice(SIZES)
        data = {"from": me, "number": number, "data": torch.full((size,), me * 1_000_000 + number)}
        try:
            queue.put(data, timeout=DEADLINE)
        except QueueClosed:
            break
        number += 1
    lender = queue._lender
    end = time.monotonic() + DEADLINE
    while lender._owner is not None and time.monotonic() < end:
        with lender._lock:
            lender._reclaim()
            lender._owner.recycle()
            if lender._owner.used == 0:
                break
        time.sleep(0.01)
    else:
        assert lender._owner is None, f"{lender._owner.used} bytes did not come back"
    os.write(report, RECORD.pack(me, -1))


def consume(queue: Any, me: int, report: int) -> None:
    """Get until the queue is closed; look at every element, and hold some for a while."""
    draw = random.Random(me)
    held: list[Any] = []
    for got in queue:
        check(got)
        os.write(report, RECORD.pack(got["from"], got["number"]))
        if draw.random() < 0.3:
            held.append(got)
        if len(held) > 3:
            held.pop(draw.randrange(len(held)))
        for old in held:
            check(old)


def check(got: Any) -> None:
    """Raise unless every byte is the message's own."""
    assert (got["data"] == got["from"] * 1_000_000 + got["number"]).all(), "other bytes"


def start(work: Any, queue: Any, me: int, report: int) -> int:
    """Fork a producer or consumer."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.alarm(120)
        work(queue, me, report)
        status = 0
    except BaseException:
        traceback.print_exc()
        os.write(report, RECORD.pack(me, -2))
    finally:
        os._exit(status)


class Storm:
    """The children, and what they reported."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.queue = torchcrew.Queue(memory_budget=BUDGET)
        self.read, self.write = os.pipe()
        self.children: dict[int, Any] = {}
        self.started = 0
        self.seen: set[tuple[int, int]] = set()
        self.facts: dict[str, Any] = {"received": 0, "twice": 0, "errors": 0, "freed": 0, "consumers_killed": 0}
        for work in (produce, consume):
            for _ in range(PRODUCERS):
                self.add(work)

    def add(self, work: Any) -> None:
        self.started += 1
        self.children[start(work, self.queue, self.started, self.write)] = work

    def kill_one(self) -> None:
        pid = self.draw.choice(sorted(self.children))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        work = self.children.pop(pid)
        self.facts["consumers_killed"] += work is consume
        self.add(work)

    def read_reports(self, seconds: float) -> int:
        """Take what was reported; returns how many messages."""
        count = 0
        while select.select([self.read], [], [], seconds if not count else 0)[0]:
            data = os.read(self.read, RECORD.size * 512)
            if not data:
                break
            for source, number in RECORD.iter_unpack(data):
                if number == -1:
                    self.facts["freed"] += 1
                elif number == -2:
                    self.facts["errors"] += 1
                else:
                    self.facts["twice"] += (source, number) in self.seen
                    self.seen.add((source, number))
                    self.facts["received"] += 1
                    count += 1
        return count

    def run(self, kills: int) -> None:
        for _ in range(kills):
            time.sleep(self.draw.uniform(0, 0.02))
            self.kill_one()
            assert self.read_reports(DEADLINE), "nothing moves any more"
        self.queue.close()
        self.finish()
        last: dict[int, int] = {}
        for source, number in self.seen:
            last[source] = max(last.get(source, 0), number)
        self.facts["missing"] = sum(last.values()) + len(last) - len(self.seen)

    def finish(self) -> None:
        os.close(self.write)
        end = time.monotonic() + 3 * DEADLINE
        while self.children:
            assert time.monotonic() < end, f"{len(self.children)} processes did not end"
            self.read_reports(0.05)
            for pid in list(self.children):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.facts["errors"] += status != 0
                    del self.children[pid]
        self.read_reports(0)
        os.close(self.read)


def main(seed: int, kills: int) -> None:
    torch.set_num_threads(1)
    descriptors = len(os.listdir("/proc/self/fd"))
    storm = Storm(seed)
    storm.run(kills)
    facts = storm.facts
    del storm
    gc.collect()
    facts["descriptors"] = len(os.listdir("/proc/self/fd")) - descriptors
    facts["mappings"] = Path("/proc/self/maps").read_text().count("torchcrew")
    print(json.dumps(facts))  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
