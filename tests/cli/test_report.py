"""The report of `torchcrew run`: what it says about loaders that are fine, starved, blocked, or not there."""

import dataclasses
import io

import pytest
from rich.console import Console

from torchcrew.cli.report import child_line, format_bytes, format_seconds, run_report, verdict
from torchcrew.data.stats import LoaderStats

LOADER = LoaderStats(
    name="Images",
    workers=2,
    epochs=1,
    batches=200,
    bytes=3_800_000_000,
    wait_s=0.2,
    first_batch_s=0.1,
    busy_s=5.0,
    idle_s=14.0,
    blocked_s=1.0,
    started_at=100.0,
    ended_at=110.0,
)


def changed(**fields) -> LoaderStats:
    return dataclasses.replace(LOADER, **fields)


def render(loaders, wall_s=12.0, width=80, **options) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(run_report(loaders, wall_s, **options))
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "loading is not the bottleneck"),
        ({"batches": 0}, "not one batch was delivered"),
        ({"wait_s": 3.8, "busy_s": 19.0, "idle_s": 0.5}, "waited 38 % of the time for data: more workers or a cheaper"),
        ({"wait_s": 3.8, "blocked_s": 12.0}, "the workers for memory"),
        ({"wait_s": 3.8}, "a larger prefetch_factor would help"),
        ({"wait_s": 3.8, "epochs": 20}, "persistent_workers=True would help"),
        ({"wait_s": 3.8, "first_batch_s": 3.7}, "nearly all of it for the first batch (3.7 s), the workers' start"),
        ({"wait_s": 3.8, "first_batch_s": 2.0}, "most of it for the first batch (2.0 s), the workers' start"),
        ({"wait_s": 3.8, "first_batch_s": 3.7}, 'torchcrew.data.DataLoader(multiprocessing_context="zygote")'),
        ({"ended_at": 100.0}, "loading is not the bottleneck"),
        ({"wait_s": 3.8, "busy_s": 0.0, "idle_s": 0.0, "blocked_s": 0.0}, "waited 38 %"),
    ],
)
def test_the_verdict_names_what_would_help(fields, expected):
    """One sentence for each way to be held up; no division by zero where nothing ran."""
    assert expected in verdict(changed(**fields))


def test_a_first_batch_that_was_slow_is_no_reason_to_prefetch_more():
    """What the start of the workers costs, no larger queue gives back."""
    assert "prefetch_factor" not in verdict(changed(wait_s=3.8, first_batch_s=2.0))
    assert "prefetch_factor" not in verdict(changed(wait_s=38.0, first_batch_s=36.0, ended_at=200.0), 10)


def test_a_loader_made_anew_for_every_epoch_is_one_row():
    """Its figures are added up, and there is one verdict, of what to do about it."""
    loaders = [changed(wait_s=3.8, first_batch_s=3.0 + k / 10, started_at=100.0 + 20 * k) for k in range(2)]
    loaders = [dataclasses.replace(loader, ended_at=loader.started_at + 10) for loader in loaders]
    text = render([*loaders, changed(name="Test", started_at=300.0, ended_at=310.0)], wall_s=40.0)
    assert text.count("Images") == 2  # in the table and before the verdict
    assert text.count("×2 loaders") == 2
    for figure in (" 400 ", "7.6 GB", "7.6 s", "38 %", "6.1 s"):  # 38 %: of the time they were alive, not in between
        assert figure in text
    words = " ".join(text.split())
    assert "→ Images ×2 loaders: the trainer waited 38 % of the time for data, most of it for the first" in words
    assert "one loader for all epochs with persistent_workers=True" in words
    assert "→ Test: loading is not the bottleneck" in words
    assert max(map(len, text.splitlines())) <= 80


def test_groups_of_one_name_are_told_apart():
    """Loaders with another number of workers are another group: the verdict says which by its batches."""
    text = render([LOADER, changed(workers=4, batches=1_500)])
    assert "→ Images (200 batches, 2 workers): " in text
    assert "→ Images (1,500 batches, 4 workers): " in text


def test_the_report_fits_a_terminal_of_80_columns():
    """Every figure is there, and no line is longer than the terminal."""
    text = render([changed(name="AnExtraordinarilyLongNameOfADataset", wait_s=3.8, busy_s=19.0, batches=1_234_567)])
    assert "12.0 s in all; the trainer waited 3.8 s (32 %) for data" in text
    for figure in ("1,234,567", "3.8 GB", "38 %", "100 ms", "busy", "idle", "blocked"):
        assert figure in text
    assert max(map(len, text.splitlines())) <= 80
    assert "…" in text


def test_many_loaders_are_cut_to_the_slowest():
    """A program that makes a loader per file gets a short report, the ones that waited most first."""
    text = render([changed(name=f"set{k}", wait_s=k / 10) for k in range(30)])
    assert "set29" in text
    assert "set21" not in text
    assert "22 more loaders" in text


@pytest.mark.parametrize(
    ("torch_imported", "expected"), [(False, "torch was not imported"), (True, "no DataLoader with workers was used")]
)
def test_without_loaders_it_is_one_line(torch_imported, expected):
    """Nothing to tell is told shortly."""
    text = render([changed(batches=0, wait_s=0.0)], torch_imported=torch_imported)
    assert expected in text
    assert len(text.splitlines()) == 1


def test_a_childs_line():
    """One line, with the rank where there is one; none for a child without loaders."""
    assert child_line([], None, 12) == ""
    assert "400 batches; Images ×2 loaders: loading" in child_line([LOADER, LOADER], None, 12)
    assert (
        child_line([LOADER], "3", 12) == "torchcrew  rank 3, pid 12: 200 batches; Images: loading is not the bottleneck"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ms"), (0.0042, "4.2 ms"), (0.084, "84 ms"), (0.9999, "1.0 s"), (4.72, "4.7 s"), (200, "3 min 20 s")],
)
def test_format_seconds(seconds, text):
    """As many digits as one reads."""
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (19_300_000, "19.3 MB"), (999_999, "1.0 MB"), (2.5e14, "250.0 TB")]
)
def test_format_bytes(count, text):
    """Powers of 1000, never four digits before the point."""
    assert format_bytes(count) == text
