"""Loaders whose workers the zygote starts: stock's spawned workers to the byte, and an end to all whoever dies."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data

from tests.crew.programs import descriptor_counts, running, state, survivors
from tests.data.observe import rng
from tests.data.scenario_errors import Raises
from tests.data.scenario_order import Draws, Stream
from tests.data.scenario_start import bad_value
from tests.data.scenario_values import as_list
from tests.data.survival import AT_ONCE, Acting, Rows, check, environment, outcome
from torchcrew.crew import guardian, zygote
from torchcrew.data import DataLoader
from torchcrew.testing.crash import die

pytestmark = pytest.mark.timeout(60)

Stock = torch.utils.data.DataLoader
#: Stock's text where its signal handler has nothing to say: the workers are the zygote's children.
EXITED = r"DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly"


@pytest.fixture(scope="module", autouse=True)
def _zygote_ends() -> Iterator[None]:
    yield
    zygote.stop()


def load(dataset: Any, **options: Any) -> Any:
    return DataLoader(dataset, **{"num_workers": 2, "multiprocessing_context": "zygote", **options})


def pids_of(iterator: Any) -> list[int]:
    return [worker.pid for worker in iterator._workers]


def two_epochs(loader_class: Any, method: str, dataset: Any, **options: Any) -> Any:
    """What two epochs under one seed bring, and the generators of this process after them."""
    torch.manual_seed(11)
    random.seed(12)
    loader = loader_class(dataset, num_workers=2, multiprocessing_context=method, collate_fn=as_list, **options)
    return [list(loader), list(loader)], rng()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("method", "persistent"),
    [("fork", False), ("fork", True), ("spawn", True), pytest.param("spawn", False, marks=pytest.mark.faults)],
)
def test_batches_are_stocks(method: str, persistent: bool) -> None:
    """Values, random draws and seeds in the workers, `get_worker_info`, the generators here: whatever started them."""
    for dataset in (Draws(), Stream((3, 2))) if method == "fork" else (Draws(),):
        ours = two_epochs(DataLoader, "zygote", dataset, persistent_workers=persistent)
        assert ours == two_epochs(Stock, method, dataset, persistent_workers=persistent)


def test_the_first_batch_comes_twice() -> None:
    """From a cold zygote and from a warm one; early breaks end the workers."""
    zygote.stop()
    for _ in range(2):
        iterator = iter(load(Rows(64), batch_size=2))
        pids = pids_of(iterator)
        check(next(iterator), 0, 2)
        del iterator
        gc.collect()
        assert survivors(pids, 1.0) == []


def test_persistent_workers_stay() -> None:
    """The same processes serve every epoch, and end with the loader."""
    loader = load(Rows(8), batch_size=2, persistent_workers=True)
    seen = set()
    for _ in range(3):
        for number, batch in enumerate(loader):
            check(batch, number, 2)
        seen.add(tuple(pids_of(loader._iterator)))
    ((first, second),) = seen
    assert state(first)
    assert state(second)
    del loader
    gc.collect()
    assert survivors([first, second], 1.0) == []


def test_an_exception_in_the_dataset() -> None:
    """Stock's type and text, and the iteration goes on behind it."""
    told = [
        outcome(lambda one=one, method=method: one(Raises(bad_value), num_workers=1, multiprocessing_context=method))
        for one, method in ((DataLoader, "zygote"), (Stock, "fork"))
    ]
    assert told[0] == told[1]
    assert told[0].kind == "ValueError"
    iterator = iter(load(Raises(bad_value)))
    got: list[Any] = []
    for _ in range(8):
        try:
            got.append(int(next(iterator)))
        except ValueError:
            got.append("raised")
    assert got == [0, 1, 2, "raised", 4, 5, 6, 7]


@pytest.mark.parametrize("how", ["sigkill", "exit"])
def test_a_worker_dies(how: str) -> None:
    """By itself: stock's error at once; the zygote and the next loader are not affected."""
    seen = outcome(lambda: load(Acting(64, 13, functools.partial(die, how)), batch_size=2))
    assert seen.kind == "RuntimeError"
    assert seen.text == "DataLoader worker (pid N) exited unexpectedly"
    assert seen.seconds < AT_ONCE
    assert len(list(load(Rows(8), batch_size=2))) == 4


def test_a_worker_is_killed_between_two_epochs() -> None:
    """The next epoch of persistent workers raises stock's error at once."""
    loader = load(Rows(16), batch_size=2, persistent_workers=True)
    assert len(list(loader)) == 8
    os.kill(pids_of(loader._iterator)[1], signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=EXITED):
        list(loader)
    assert time.monotonic() - begun < AT_ONCE


def test_an_unpicklable_dataset() -> None:
    """Stock's error from `iter`, before anything was started."""
    told = [
        outcome(lambda one=one, method=method: one([lambda: 1], num_workers=1, multiprocessing_context=method))
        for one, method in ((DataLoader, "zygote"), (Stock, "spawn"))
    ]
    assert told[0] == told[1]
    assert "pickle" in told[0].text
    assert multiprocessing.active_children() == []


def epoch_without_a_zygote(loader: Any, at: int, delay: float = 0.0) -> int | str:
    """Iterate; the zygotes are killed ``delay`` seconds after batch ``at``.

    Returns:
        The number of batches, or the error's text.

    Raises:
        AssertionError: a batch is wrong, the error came late, or something was left.
    """
    iterator = iter(loader)
    pids = pids_of(iterator)
    count = 0
    last = time.monotonic()
    try:
        for count, batch in enumerate(iterator, 1):
            check(batch, count - 1, 2)
            if count == at:
                time.sleep(delay)
                for pid in zygote.pids():
                    os.kill(pid, signal.SIGKILL)
            last = time.monotonic()
    except RuntimeError as error:
        return str(error) if time.monotonic() - last < AT_ONCE else f"late: {error}"
    finally:
        loader._iterator = None
        del iterator
        gc.collect()
        assert survivors(pids, 1.0) == []
    return count


@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.faults)])
def test_the_zygote_is_killed_in_an_epoch(persistent: bool) -> None:
    """torch's workers leave when their parent is gone: stock's error at once, or none where their work was done."""
    for at, ends in ((1, EXITED), (7, EXITED), (20, "20")):
        loader = load(Rows(40, seconds=0.01), batch_size=2, persistent_workers=persistent)
        assert re.fullmatch(ends, str(epoch_without_a_zygote(loader, at)))
        assert zygote.pids() == ()
    assert len(list(load(Rows(8), batch_size=2))) == 4


@pytest.mark.parametrize(
    "kills", [3, pytest.param(50, marks=[pytest.mark.faults, pytest.mark.timeout(400)], id="many")]
)
def test_the_zygote_is_killed_at_random_instants(kills: int) -> None:
    """The epoch completes or stock's error comes at once; nothing hangs and nothing is left."""
    for _ in range(kills):
        loader = load(Rows(40, seconds=0.002), batch_size=2)
        seen = epoch_without_a_zygote(loader, random.randrange(1, 20), random.random() * 0.02)
        assert seen == 20 or re.fullmatch(EXITED, str(seen))


@pytest.mark.faults
def test_the_zygote_is_killed_under_idle_workers() -> None:
    """torch's workers look every 5 s whether their parent lives, and leave; the next epoch says so at once."""
    loader = load(Rows(16), batch_size=2, persistent_workers=True)
    assert len(list(loader)) == 8
    pids = pids_of(loader._iterator)
    for pid in zygote.pids():
        os.kill(pid, signal.SIGKILL)
    assert survivors(pids, 12.0) == []
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=EXITED):
        list(loader)
    assert time.monotonic() - begun < AT_ONCE


@pytest.mark.parametrize(("method", "number"), [("zygote", 2), ("fork", 1)])
def test_pidfds_of_a_worker(method: str, number: int) -> None:
    """One, which guardian and receiver share; with the zygote one more, the sentinel of the process object."""
    iterator = iter(load(Rows(8), multiprocessing_context=method))
    next(iterator)
    watched = []
    for fd in os.listdir("/proc/self/fdinfo"):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
            watched += [int(line.split()[1]) for line in lines if line.startswith("Pid:")]
    assert [watched.count(pid) for pid in pids_of(iterator)] == [number, number]


def test_epochs_leave_no_descriptor_anywhere() -> None:
    """Neither here nor in the guardian or the zygotes."""

    def epochs(number: int) -> None:
        for _ in range(number):
            assert len(list(load(Rows(8), batch_size=2))) == 4

    epochs(2)
    pids = [os.getpid(), guardian.pid() or 0, *zygote.pids()]
    before = descriptor_counts(pids)
    epochs(5)
    assert descriptor_counts(pids) == before


USER = """
import json, os, time
from tests.data.survival import Rows
from torchcrew.crew import guardian, zygote
from torchcrew.data import DataLoader

if __name__ == "__main__":
    loader = DataLoader(Rows(6000, seconds=0.01), batch_size=2, num_workers=2, multiprocessing_context="zygote")
    iterator = iter(loader)
    next(iterator)
    pids = [*(worker.pid for worker in iterator._workers), *zygote.pids(), guardian.pid()]
    os.write(1, (json.dumps(pids) + "\\n").encode())
    for _ in iterator:
        pass
"""


@pytest.mark.parametrize(
    "before", [pytest.param((), id="alone", marks=pytest.mark.faults), pytest.param((2, 3), id="after its zygotes")]
)
def test_the_user_is_killed(tmp_path: Path, before: tuple[int, ...]) -> None:
    """Workers, zygotes and guardian are gone within a second, also workers whose zygote went first."""
    with running(USER, path=tmp_path / "user.py", env=environment()) as program:
        pids = program.workers(40)
        assert len(pids) == 5
        for which in before:
            os.kill(pids[which], signal.SIGKILL)
        time.sleep(0.1)
        program.kill()
        assert survivors(pids, 1.0) == []
