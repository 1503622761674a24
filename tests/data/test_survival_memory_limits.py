"""Small /dev/shm, few descriptors, little address space, small files, unlimited cores; our own memory budget."""

from __future__ import annotations

import itertools
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.programs import limits
from tests.data.survival import MB, PROGRAMS, Rows, check, environment
from torchcrew.data import DataLoader
from torchcrew.errors import ArenaFull
from torchcrew.testing.crash import ProgramResult, run_program

#: A row of one megabyte.
MEGA = MB // 4


def run_limits(limit: str, which: str, timeout: float = 40.0) -> ProgramResult:
    result = run_program(PROGRAMS / "limits.py", limit, which, timeout=timeout, env=environment())
    if result.returncode == limits.SKIP:
        pytest.skip("a mount namespace of one's own is not permitted here (unshare -m)")
    return result


@pytest.mark.timeout(60)
def test_a_small_dev_shm_is_not_used() -> None:
    """Batches of 40 MB come through although /dev/shm has 64 MB; stock's do not."""
    assert run_limits("shm", "ours").check().stdout == "right\n"
    stock = run_limits("shm", "stock")
    assert stock.returncode == 1
    assert "No space left on device" in stock.stderr or "Bus error" in stock.stderr


@pytest.mark.timeout(60)
def test_64_descriptors_are_enough_for_a_list_of_2000_batches() -> None:
    """Descriptors do not grow with the batches held; stock fails at some dozens."""
    assert run_limits("descriptors", "ours").check().stdout == "right\n"


@pytest.mark.parametrize("limit", ["address_space", "file_size"])
@pytest.mark.timeout(60)
def test_ulimit_v_and_ulimit_f(limit: str) -> None:
    """The sparse arena fits an address space of 8 GB and files of at most 1 GB."""
    assert run_limits(limit, "ours").check().stdout == "right\n"


@pytest.mark.timeout(40)
def test_a_file_size_limit_below_one_batch_is_an_error() -> None:
    """It cannot work, so it says so; it does not wait for ever."""
    result = run_limits("small_file", "ours", timeout=15)
    assert not result.timed_out, result.stderr
    assert result.returncode == 1
    assert "ArenaFull" in result.stderr


@pytest.mark.timeout(40)
def test_an_abort_with_unlimited_cores_is_quick_and_writes_no_arena(tmp_path: Path) -> None:
    """480 MB of batches are mapped in the worker that aborts; none of it gets into a core."""
    if resource.getrlimit(resource.RLIMIT_CORE)[1] != resource.RLIM_INFINITY:
        pytest.skip("the hard limit forbids cores")
    env = {**environment(), "PYTHONFAULTHANDLER": ""}  # prints a stack first
    seconds = []
    # With the arena in it, a core takes five seconds. A busy machine makes one of them slow, not three.
    while min(seconds, default=9.0) >= 2.0 and len(seconds) < 3:
        seconds.append(float(run_program(PROGRAMS / "abort.py", timeout=12, env=env, cwd=tmp_path).check().stdout))
    assert min(seconds) < 2.0
    sizes = [path.stat().st_blocks * 512 for path in tmp_path.glob("core*")]  # none where a pipe takes them
    assert sum(sizes) < 300 * MB


# ----------------------------------------------------------------------------------------------- our own memory budget


@pytest.mark.parametrize(
    ("custom", "workers"),
    [
        pytest.param(
            *(custom, workers),
            id=f"{'custom' if custom else 'default'} collate-{workers}",
            marks=() if (custom, workers) in ((False, 4), (True, 1)) else pytest.mark.faults,
        )
        for custom in (False, True)
        for workers in (1, 2, 4)
    ],
)
@pytest.mark.timeout(20)
def test_a_slow_user_with_a_small_budget_gets_every_batch(workers: int, custom: bool) -> None:
    """The budget holds fewer batches than the loader prefetches: the workers wait for the user."""
    loader = DataLoader(
        Rows(48, MEGA),
        batch_size=2,
        num_workers=workers,
        memory_budget=f"{2 * (workers + 2)}MiB",
        collate_fn=torch.stack if custom else None,
    )
    for number, batch in enumerate(loader):
        check(batch, number, 2, MEGA)
        del batch
        time.sleep(0.01 if number else 0.2)
    assert number == 23


@pytest.mark.parametrize("in_order", [True, pytest.param(False, marks=pytest.mark.faults)])
@pytest.mark.timeout(20)
def test_a_user_slower_than_a_second_is_waited_for(in_order: bool) -> None:
    """The time that the user takes between two batches is no starvation."""
    loader = DataLoader(Rows(8, MEGA), num_workers=2, memory_budget="5MiB", in_order=in_order)
    seen = []
    for batch in loader:
        seen.append(int(batch[0, 0]) // 1_000_003)
        del batch
        if len(seen) == 2:
            time.sleep(2.5)
    assert sorted(seen) == list(range(8))


@pytest.mark.parametrize("budget", ["3MiB", "4MiB"])
@pytest.mark.timeout(20)
def test_batches_that_came_early_do_not_starve_the_one_that_is_next(budget: str) -> None:
    """Worker 1 could fill the budget with later batches while worker 0 takes its time over the next one."""

    class FirstIsSlow(Rows):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index % 4 == 0:
                time.sleep(0.2)
            return super().__getitem__(index)

    loader = DataLoader(FirstIsSlow(12, MEGA), num_workers=2, prefetch_factor=4, memory_budget=budget)
    for number, batch in enumerate(loader):
        check(batch, number, 1, MEGA)
        del batch
    assert number == 11


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.timeout(20)
def test_who_holds_everything_gets_an_error_that_names_the_budget(in_order: bool) -> None:
    """About a second after nothing can come any more; what was held stays right."""
    loader = DataLoader(Rows(64, MEGA), batch_size=2, num_workers=2, memory_budget="24MiB", in_order=in_order)
    held = []
    start = time.monotonic()
    with pytest.raises(ArenaFull) as caught:  # noqa: PT012
        for batch in loader:
            held.append(batch)
            start = time.monotonic()
    assert time.monotonic() - start < 3.0
    assert len(held) >= 8
    assert "25.2 MB" in str(caught.value)
    assert "memory_budget=" in str(caught.value)
    assert "TORCHCREW_BUDGET" in str(caught.value)
    assert isinstance(caught.value, RuntimeError)
    for batch in held:
        check(batch, int(batch[0, 0]) // 2_000_006, 2, MEGA)


@pytest.mark.timeout(20)
def test_iteration_goes_on_after_memory_was_given_back() -> None:
    """ArenaFull costs the batch it was raised for, like any exception in a worker."""
    loader = DataLoader(Rows(40, MEGA), batch_size=2, num_workers=1, memory_budget="12MiB")
    iterator = iter(loader)
    held: list[Any] = []
    with pytest.raises(ArenaFull):
        held.extend(iterator)
    held.clear()
    rest = [int(batch[0, 0]) // 2_000_006 for batch in iterator]
    assert rest == sorted(rest)
    assert rest[-1] == 19


@pytest.mark.parametrize("custom", [False, True], ids=["default collate", "custom collate"])
@pytest.mark.timeout(20)
def test_a_budget_smaller_than_one_batch(custom: bool) -> None:
    """No waiting can help: an error at once."""
    collate = torch.stack if custom else None
    loader = DataLoader(Rows(8, MEGA), batch_size=4, num_workers=2, memory_budget="2MB", collate_fn=collate)
    start = time.monotonic()
    with pytest.raises(ArenaFull, match=r"4\.\d MB.*2\.0 MB.*memory_budget="):
        list(loader)
    assert time.monotonic() - start < 2.0


@pytest.mark.timeout(20)
def test_the_budget_bounds_memory() -> None:
    """What all arenas take stays below the budget while the user lags behind."""
    loader = DataLoader(Rows(60, MEGA), batch_size=2, num_workers=2, prefetch_factor=8, memory_budget="16MiB")
    iterator = iter(loader)
    for number, batch in enumerate(itertools.islice(iterator, 12)):
        check(batch, number, 2, MEGA)
        del batch
        time.sleep(0.02)
        taken = sum(arena.resident_bytes() for arena in iterator._transport._arenas)
        assert taken <= 16 * MB + 2 * MB  # lease tables and headers beside the blocks


def test_the_variable_sets_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """TORCHCREW_BUDGET, where the option is not given."""
    monkeypatch.setenv("TORCHCREW_BUDGET", "2MB")
    with pytest.raises(ArenaFull, match=r"2\.0 MB"):
        list(DataLoader(Rows(8, MEGA), batch_size=4, num_workers=1))


class OneLargeEach(Rows):
    """Sample 0 (worker 0) and sample 9 (worker 1) are large, all others small."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index).repeat(32 if index in (0, 9) else 1)


@pytest.mark.timeout(20)
def test_memory_that_another_worker_keeps_warm_is_given_up() -> None:
    """Worker 0 has 8 MB that were returned; it needs them no more, and worker 1 gets them."""
    loader = DataLoader(OneLargeEach(10, MEGA // 4), batch_size=None, num_workers=2, memory_budget="12MiB")
    for number, sample in enumerate(loader):
        assert torch.equal(sample[: MEGA // 4], Rows(1, MEGA // 4)[number])
        del sample
        time.sleep(0.05)
    assert number == 9
