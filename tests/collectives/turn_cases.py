"""Turns without a process group: what ranks write before one is what all read behind it."""

from __future__ import annotations

import random
import time
from typing import Any

import torch.distributed as dist

from torchcrew.collectives.turns import SLICE


def _turns() -> Any:
    return dist.group.WORLD._meeting.turns  # type: ignore[union-attr]


def pages(rank: int, size: int, count: int) -> int:
    """Turns in which somebody has read another number than that of the turn; ranks are slow by chance."""
    turns, draw, wrong = _turns(), random.Random(rank), 0
    segment = turns.segment
    heads = [[segment.head(place, parity) for place in range(size)] for parity in (0, 1)]
    for number in range(count):
        heads[turns.parity][rank][:8] = number.to_bytes(8, "little")
        turns.turn(time.monotonic() + 10)
        if draw.random() < 0.02:
            time.sleep(draw.random() * 0.002)
        read = [int.from_bytes(bytes(head[:8]), "little") for head in heads[turns.parity ^ 1]]
        wrong += read != [number] * size
        if draw.random() < 0.02:
            time.sleep(draw.random() * 0.002)
    return wrong


def counted(rank: int, size: int) -> tuple[int, list[int]]:
    """How many turns this rank has ended, and what is said of all."""
    turns = _turns()
    for _ in range(5):
        turns.turn(time.monotonic() + 10)
    dist.barrier()
    said = [turns.segment.turn(place) for place in range(size)]
    dist.barrier()
    return turns.number, said


def given_up(rank: int, size: int) -> tuple[str, str, str]:
    """What ranks are told of one that gives up: those that wait, and those that come later."""
    turns = _turns()
    turns.turn(time.monotonic() + 10)
    if rank == 1:
        turns.give_up("enough")
        turns.give_up("a second reason")
        return turns.broken, "", ""
    if rank == 2:
        time.sleep(5 * SLICE)
    first = second = ""
    try:
        turns.turn(time.monotonic() + 10)
    except RuntimeError as error:
        first = f"{type(error).__name__}: {error}"
    try:
        dist.barrier()
    except RuntimeError as error:
        second = str(error)
    return turns.broken, first, second
