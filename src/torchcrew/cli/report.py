"""The report that `torchcrew run` prints: where the time went, what waited for what, and what would help.

Pure: it takes what `torchcrew.data.loader_stats()` returned and gives something that rich can print.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from torchcrew.data.stats import LoaderStats

__all__ = ("child_line", "format_bytes", "format_seconds", "run_report", "verdict")

WAIT_IS_FINE = 0.05
"""Share of a loader's time below which the trainer's waiting is not worth a change."""
WORKERS_ARE_BUSY = 0.75
"""Share of the workers' time above which they, and not the way to the trainer, set the pace."""
WORKERS_ARE_BLOCKED = 0.25
"""Share of the workers' time spent without memory for the next batch above which that is the news."""
SHOWN_LOADERS = 8
"""Rows of the table; programs that make a loader per epoch or per file have hundreds."""


def run_report(loaders: Sequence[LoaderStats], wall_s: float, *, torch_imported: bool = True) -> RenderableType:
    """The report of one process.

    Args:
        loaders: one entry per loader that had workers.
        wall_s: seconds from the start of the program to its end.
        torch_imported: whether the program imported torch at all.
    """
    used = [loader for loader in loaders if loader.batches or loader.wait_s > 0]
    head = Text.assemble(("torchcrew", "bold cyan"), f"  {format_seconds(wall_s)} in all")
    if not used:
        reason = "no DataLoader with workers was used" if torch_imported else "torch was not imported"
        return Text.assemble(head, f"; {reason} in this process")
    waited = sum(loader.wait_s for loader in used)
    head.append(f"; the trainer waited {format_seconds(waited)} ({_percent(waited, wall_s)}) for data")
    shown = sorted(used, key=lambda loader: loader.wait_s, reverse=True)[:SHOWN_LOADERS]
    parts: list[RenderableType] = [head, _table(shown)]
    if len(used) > len(shown):
        parts.append(Text(f"  … and {len(used) - len(shown)} more loaders that waited less", style="dim"))
    return Group(*parts, *(_verdict_line(loader, named=len(shown) > 1) for loader in shown))


def verdict(loader: LoaderStats) -> str:
    """What held this loader up and what would help, in one sentence."""
    alive = _alive_s(loader)
    share = loader.wait_s / alive if alive > 0 else 0.0
    if not loader.batches:
        return "not one batch was delivered"
    if share < WAIT_IS_FINE:
        return "loading is not the bottleneck"
    waited = f"the trainer waited {_percent(share, 1)} of the time for data"
    busy, _, blocked = _worker_shares(loader)
    if loader.epochs > 1 and loader.first_batch_s * loader.epochs > loader.wait_s / 2:
        first = format_seconds(loader.first_batch_s)
        return f"{waited}, probably at each epoch's start (first batch: {first}): persistent_workers=True would help"
    if blocked > WORKERS_ARE_BLOCKED:
        return f"{waited}, the workers for memory: a larger TORCHCREW_BUDGET or smaller batches would help"
    if busy > WORKERS_ARE_BUSY:
        return f"{waited}: more workers or a cheaper __getitem__ would help"
    return f"{waited} though the workers had time: a larger prefetch_factor would help"


def child_line(loaders: Sequence[LoaderStats], rank: str | None, pid: int) -> str:
    """One line about a child process, or an empty string where there is nothing to say."""
    used = [loader for loader in loaders if loader.batches]
    if not used:
        return ""
    slowest = max(used, key=lambda loader: loader.wait_s)
    who = f"rank {rank}, pid {pid}" if rank is not None else f"pid {pid}"
    batches = sum(loader.batches for loader in used)
    return f"torchcrew  {who}: {batches:,} batches; {slowest.name}: {verdict(slowest)}"


def format_seconds(seconds: float) -> str:
    """Seconds with as many digits as one reads: ``84 ms``, ``4.72 s``, ``3 min 20 s``."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 or seconds <= 0 else f"{seconds * 1e3:.1f} ms"
    if seconds < 119.5:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def format_bytes(count: float) -> str:
    """Bytes in powers of 1000: ``512 B``, ``19.3 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _table(loaders: Sequence[LoaderStats]) -> Table:
    table = Table(box=None, padding=(0, 0, 0, 1), header_style="dim")
    table.add_column("loader", overflow="ellipsis", no_wrap=True, max_width=16)
    for title in ("", "batches", "data", "waited", "", "first", "busy", "idle", "blocked"):
        table.add_column(title, justify="right", no_wrap=True)
    for loader in loaders:
        table.add_row(
            loader.name,
            f"×{loader.workers}",
            f"{loader.batches:,}",
            format_bytes(loader.bytes),
            format_seconds(loader.wait_s),
            _percent(loader.wait_s, _alive_s(loader)),
            format_seconds(loader.first_batch_s),
            *(_percent(share, 1) for share in _worker_shares(loader)),
        )
    return table


def _verdict_line(loader: LoaderStats, named: bool) -> RenderableType:
    sentence = verdict(loader)
    style = "green" if sentence == "loading is not the bottleneck" else "yellow"
    line = Table.grid(padding=(0, 1))  # two columns, so that a long sentence wraps beside the arrow
    line.add_row("  →", Text.assemble(f"{loader.name}: " if named else "", (sentence, style)))
    return line


def _worker_shares(loader: LoaderStats) -> tuple[float, float, float]:
    """(busy, idle, blocked) as shares of the workers' time."""
    total = loader.busy_s + loader.idle_s + loader.blocked_s
    if total <= 0:
        return (0.0, 0.0, 0.0)
    return (loader.busy_s / total, loader.idle_s / total, loader.blocked_s / total)


def _alive_s(loader: LoaderStats) -> float:
    return max(loader.ended_at - loader.started_at, 0.0)


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}".replace("%", " %") if whole > 0 else "0 %"
