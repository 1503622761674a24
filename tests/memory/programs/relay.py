"""A producer and a consumer of messages, one of which is killed at a system call: `relay.py VICTIM SEED POINT ...`

    this process ── forks ──► consumer ── forks ──► producer          in a new arena for every trial
         └── starts ──► strace --attach=victim --inject=NAME:signal=KILL:when=N

VICTIM is "producer" or "consumer". A POINT is "NAME:N", the N-th call of that name after the victim was attached, or
"count", which kills nobody and tells how many calls there are of each name. For every trial one line of JSON is
printed: what the survivor saw, and how both ended.

Every tensor says which message it belongs to. Nobody waits for anything longer than `DEADLINE`; who does has failed.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import gc
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np
import torch

from torchcrew.channel.packets import IndexReceiver, IndexSender, Receiver, Sender
from torchcrew.channel.sockets import seqpacket_pair
from torchcrew.channel.writer import BlockWriter
from torchcrew.errors import ArenaFull
from torchcrew.memory.arena import Arena, ArenaOwner, Loan
from torchcrew.memory.lease import ON_LOAN, open_leases

MESSAGES = 12
DEADLINE = 10.0
#: So little that blocks must come back. What is held when the second producer is forked is not, as long as that lives.
BUDGET = 6 << 20
#: Elements of a message's tensors: inline, in a small block, in a large one.
SIZES = (3, 1_000, 20_000, 60_000)
_PR_SET_PTRACER, _PR_SET_CHILD_SUBREAPER = 0x59616D61, 36


def message(seed: int, number: int) -> Any:
    """What message ``number`` of a run is."""
    draw = random.Random(seed * 1000 + number)
    size = draw.choice(SIZES)
    tensors = [torch.full((size,), number), torch.full((draw.choice(SIZES[:2]),), number)]
    text = "x" * (60_000 if draw.random() < 0.2 else 5)
    return {"number": number, "tensors": tensors, "array": np.full(size // 2, number), "text": text}


def check(got: Any, number: int) -> None:
    """Raise unless every byte is message ``number``'s."""
    assert got["number"] == number, (got["number"], number)
    for data in (*got["tensors"], torch.from_numpy(got["array"])):
        assert (data == number).all(), f"message {number} shows other bytes"


class Gate:
    """Where the victim waits until it is traced."""

    def __init__(self) -> None:
        self._ready, self._go = os.pipe(), os.pipe()

    def wait(self) -> None:
        """In the victim: tell the pid, wait for the sign."""
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)  # refused where Yama is not there
        os.write(self._ready[1], str(os.getpid()).encode())
        assert select.select([self._go[0]], [], [], DEADLINE)[0], "nobody traces"
        os.read(self._go[0], 1)

    def pid(self) -> int:
        """Outside: the victim's pid, once it waits."""
        assert select.select([self._ready[0]], [], [], DEADLINE)[0], "no victim"
        return int(os.read(self._ready[0], 20))

    def open(self) -> None:
        """Outside: let it go."""
        os.write(self._go[1], b"x")

    def close(self) -> None:
        """Close this process's ends."""
        for fd in (*self._ready, *self._go):
            os.close(fd)


def in_child(work: Any, report: int) -> int:
    """Fork; the child runs ``work`` and exits with 0, or reports its traceback and exits with 1."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.alarm(int(3 * DEADLINE))
        work()
        status = 0
    except BaseException:
        os.write(report, (json.dumps({"error": traceback.format_exc()}) + "\n").encode())
    finally:
        os._exit(status)


def reap(pid: int) -> int:
    """The exit code of a child, within the deadline."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"process {pid} did not end")


def produce(seed: int, arena: Arena, taken: list[Loan], sock: Any, indices: Any, gate: Gate | None) -> None:
    """Send one message for each index until the indices end, or the consumer does."""

    def make_room(nbytes: int) -> None:
        end, used = time.monotonic() + DEADLINE, owner.used
        while owner.used >= used:
            if sender.hung_up(0.001):
                raise ArenaFull("nobody receives")
            assert time.monotonic() < end, "no room"
            owner.recycle()

    owner = ArenaOwner(arena, taken, lambda nbytes: nbytes <= BUDGET)
    sender, receiver = Sender(sock, 0, BlockWriter(owner, make_room)), IndexReceiver(indices)
    if gate is not None:
        gate.wait()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, EOFError, ArenaFull):
        while (number := receiver.get(DEADLINE)) is not None:
            sender.send(message(seed, number))
            if number % 5 == 0:
                owner.shrink(0)


class Relay:
    """The consumer's side of one producer."""

    def __init__(self, seed: int, arena: Arena, report: int, gate: Gate | None) -> None:
        ours, theirs = seqpacket_pair()
        our_indices, their_indices = seqpacket_pair()
        taken = open_leases(arena)

        def work() -> None:
            ours.close()
            our_indices.close()
            produce(seed, arena, taken, theirs, their_indices, gate)

        self.pid = in_child(work, report)
        theirs.close()
        their_indices.close()
        self.receiver = Receiver(ours, lambda number, loan: arena.lease(loan), lambda number: True)
        self.indices = IndexSender(our_indices)
        self.receiver.index_senders = (self.indices,)
        self.pidfd = os.pidfd_open(self.pid)
        self.receiver.watch(0, self.pidfd)

    def consume(self, seed: int, held: list[tuple[int, Any]]) -> int:
        """Ask for all messages, check them, hold some; returns how many came."""
        for number in (*range(MESSAGES), None):
            self.indices.put(number)
        draw = random.Random(seed)
        for number in range(MESSAGES):
            try:
                got = self.receiver.get(DEADLINE)
            except Empty:
                # The end of its only sender's socket is seen a moment before the end of the process.
                assert select.select([self.pidfd], [], [], 1.0)[0], "waited in vain for a producer that lives"
                return number
            check(got, number)
            if draw.random() < 0.4:
                held.append((number, got))
            if len(held) > 2:
                held.pop(0)
            for kept, old in held:
                check(old, kept)
        return MESSAGES

    def close(self) -> int:
        """Hang up, and reap; returns the producer's exit code."""
        self.indices.close()
        self.receiver.hang_up()
        self.receiver.close()
        os.close(self.pidfd)
        return reap(self.pid)


def consume(victim: str, seed: int, report: int, gate: Gate) -> None:
    """One run with the producer or this process being the victim, and a second one in the same arena."""
    descriptors = len(os.listdir("/proc/self/fd"))
    arena = Arena.create()
    held: list[tuple[int, Any]] = []
    relay = Relay(seed, arena, report, gate if victim == "producer" else None)
    if victim == "consumer":
        gate.wait()
    received = relay.consume(seed, held)
    status = relay.close()
    again = Relay(seed + 1, arena, report, None)
    assert again.consume(seed + 1, held) == MESSAGES
    assert again.close() == 0
    held.clear()
    last = ArenaOwner(arena, open_leases(arena))
    assert last.used == 0, "blocks are taken that nobody sees"
    assert ON_LOAN not in bytes(arena.table[: last._high])
    arena.close()
    del last, relay, again, arena
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors, "descriptors are left"
    assert "torchcrew" not in Path("/proc/self/maps").read_text(), "a mapping is left"
    os.write(report, (json.dumps({"received": received, "producer": status}) + "\n").encode())


def trial(victim: str, seed: int, point: str) -> dict[str, Any]:
    """One run, with the victim killed at ``point``; what was reported, and how the consumer ended."""
    read, report = os.pipe()
    gate = Gate()
    with tempfile.NamedTemporaryFile(prefix="torchcrew-trace-") as trace:
        consumer = in_child(lambda: consume(victim, seed, report, gate), report)
        os.close(report)
        inject = [] if point == "count" else ["-e", "inject={}:signal=KILL:when={}".format(*point.split(":"))]
        command = ["strace", "-o", trace.name, *inject, "-p", str(gate.pid())]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as strace:
            assert strace.stderr is not None
            said = strace.stderr.readline()
            assert b"attached" in said, said
            gate.open()
            status = reap(consumer)
            # The pipe ends when consumer and producer are both gone: also the producer of a killed consumer.
            lines = read_all(read)
        names = [line.partition("(")[0] for line in trace.read().decode(errors="replace").splitlines() if "(" in line]
    os.close(read)
    gate.close()
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    facts: dict[str, Any] = {"point": point, "consumer": status}
    for line in lines:
        facts.update(json.loads(line))
    if point == "count":
        facts["counts"] = collections.Counter(names)
    return facts


def read_all(fd: int) -> list[str]:
    """Lines until the end of file."""
    data, end = b"", time.monotonic() + 2 * DEADLINE
    while time.monotonic() < end:
        if select.select([fd], [], [], 0.1)[0]:
            part = os.read(fd, 65536)
            if not part:
                return data.decode().splitlines()
            data += part
    raise AssertionError("a process of the trial is still there")


def main(victim: str, seed: int, points: list[str]) -> None:
    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for point in points:
        facts = trial(victim, seed, point)
        os.write(1, (json.dumps(facts) + "\n").encode())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
