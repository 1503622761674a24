"""FSDP2's `fully_shard` in two ranks: it learns, each rank keeps half, and the bits are gloo's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchcrew
from examples import fsdp_tiny
from torchcrew.crew import zygote

EXAMPLE = Path(fsdp_tiny.__file__)
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module", autouse=True)
def _zygote_ends() -> Iterator[None]:
    yield
    zygote.stop()


def test_it_learns() -> None:
    """The loss falls to almost nothing, one bar of one rank, and each rank keeps half of what one process would."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-W", "error", str(EXAMPLE), "--nproc", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, env=environment)
    assert done.returncode == 0, done.stderr
    *steps, accuracy, whole, kept = done.stdout.splitlines()
    losses = dict(map(step_and_loss, steps))
    assert list(losses) == [1, *range(10, 61, 10)]
    assert losses[1] > 3
    assert losses[60] < 0.1
    assert float(found(r"repeated rightly: (.+)%", accuracy)) > 95
    assert found(r"parameters and optimizer: (.+) MB", whole) == "4.90"
    assert found(r"of these, by rank: (.+)", kept) == "2.43 MB 2.42 MB"
    assert len(re.findall(r"^training ━+ 100%", done.stderr, re.MULTILINE)) == 1


def step_and_loss(line: str) -> tuple[int, float]:
    return int(found(r"step (\d+): .*", line)), float(found(r"step \d+: loss (.+)", line))


def found(pattern: str, line: str) -> str:
    match = re.fullmatch(pattern, line)
    assert match, line
    return match[1]


def test_the_backend_does_not_change_the_losses() -> None:
    """Shards gathered and gradients scattered through shared memory are gloo's, bit for bit."""
    crew, gloo = (torchcrew.launch(fsdp_tiny.train, 4, nprocs=2, backend=backend) for backend in ("crew", "gloo"))
    assert [one.losses for one in crew] == [one.losses for one in gloo]
    assert crew[0].losses == crew[1].losses
