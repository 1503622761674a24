"""The tutorial's training on real digits: the same file by `launch`, under torchrun and under the command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import torchcrew
from examples import ddp_digits
from torchcrew.crew import zygote
from torchcrew.errors import RankFailed

EXAMPLE = Path(ddp_digits.__file__)
#: How the same file is started in two ranks.
WAYS = {
    "launch": [sys.executable, "-W", "error", str(EXAMPLE), "--nproc", "2"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(EXAMPLE)],
    "torchcrew launch": [sys.executable, "-m", "torchcrew.cli", "launch", "-n", "2", "--logs", "none", str(EXAMPLE)],
}
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module", autouse=True)
def _zygote_ends() -> Iterator[None]:
    yield
    zygote.stop()


@pytest.fixture(scope="module")
def crew() -> Iterator[torchcrew.Crew]:
    """Two ranks, for what is not about their start."""
    with torchcrew.Crew(2, env={"OMP_NUM_THREADS": "1"}) as ranks:
        ranks.run(torchcrew.rank)
        yield ranks


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way == "launch" else pytest.mark.faults) for way in WAYS]
)
def test_it_learns(way: str, tmp_path: Path) -> None:
    """Uneven ends, the same weights in all ranks, one report of one rank, one bar for each epoch, a checkpoint."""
    checkpoint = tmp_path / "digits.pt"
    # Nobody's rank, whatever a test before this one has set.
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [*WAYS[way], "--epochs", "3", "--checkpoint", str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, env=environment)
    assert done.returncode == 0, done.stderr
    patterns = [
        *(rf"epoch {epoch}: loss by rank \d+\.\d+ \d+\.\d+" for epoch in (1, 2, 3)),
        "batches by rank: 45 44",
        "all ranks agree: True",
        r"test accuracy: (\d+\.\d+)%",
    ]
    lines = done.stdout.splitlines()
    matches = [re.fullmatch(pattern, line) for pattern, line in zip(patterns, lines, strict=True)]
    assert all(matches), lines
    assert float(matches[-1][1]) > 90  # type: ignore[index]
    assert len(re.findall(r"^epoch \d ━+ 100%", done.stderr, re.MULTILINE)) == 3
    assert torch.load(checkpoint, weights_only=True)["epochs"] == 3
    assert list(tmp_path.iterdir()) == [checkpoint]


def test_every_image_is_seen_once(crew: torchcrew.Crew) -> None:
    """The ranks' samplers share out all images and repeat none, in another order in each epoch."""
    orders = [crew.run(shares, epoch) for epoch in (0, 1)]
    for first, second in orders:
        assert (len(first), len(second)) == (705, 704)
        assert sorted(first + second) == list(range(ddp_digits.TRAIN))
    assert orders[0] != orders[1]


def shares(epoch: int) -> list[int]:
    """Runs in a rank."""
    sampler = ddp_digits.EachOnce(range(ddp_digits.TRAIN), seed=0, drop_last=False)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_it_goes_on_where_it_was(crew: torchcrew.Crew, tmp_path: Path) -> None:
    """Two epochs and, after a restart, a third are the same three as those of one run.

    Which also says that no rank has a state of its own: only rank 0's was saved.
    """
    checkpoint = tmp_path / "digits.pt"
    at_once = crew.run(ddp_digits.train, 3)
    crew.run(ddp_digits.train, 2, checkpoint)
    in_two = crew.run(ddp_digits.train, 3, checkpoint, resume=True)
    assert [list(one.losses) for one in in_two] == [[3], [3]]
    for one in (*at_once, *in_two):
        torch.testing.assert_close(one.weights, at_once[0].weights)
        assert one.accuracy > 0.9


def test_without_a_checkpoint_there_is_nothing_to_resume(crew: torchcrew.Crew, tmp_path: Path) -> None:
    """The error is the first rank's own; last in this file, as it ends the ranks."""
    with pytest.raises(FileNotFoundError) as caught:
        crew.run(ddp_digits.train, 1, tmp_path / "none.pt", resume=True)
    assert isinstance(caught.value.__cause__, RankFailed)
    assert "in load" in str(caught.value.__cause__)
