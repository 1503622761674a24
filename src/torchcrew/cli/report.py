"""The report that `torchcrew run` prints: where the time went, what waited for what, and what would help.

Pure: it takes what `torchcrew.data.loader_stats()` returned and gives something that rich can print.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
NEARLY_ALL = 0.9
"""Share of the waiting above which the report says so, and not that it was most of it."""
SHOWN_LOADERS = 8
"""Rows of the table; programs that make a loader per file have hundreds."""


#: Its own start costs the import of torch, so that it is the second start of a program that gains.
_OR_ZYGOTE = 'or with spawn or forkserver torchcrew.data.DataLoader(multiprocessing_context="zygote")'


@dataclass(frozen=True)
class _Group:
    """Loaders of one kind of dataset with as many workers: programs make a loader anew for every epoch, say."""

    stats: LoaderStats
    """Their figures, added up; `ended_at` is so that the time they were alive is the sum of theirs."""
    loaders: int

    @property
    def title(self) -> str:
        return self.stats.name if self.loaders == 1 else f"{self.stats.name} ×{self.loaders} loaders"


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
    groups = _groups(used)
    shown, hidden = groups[:SHOWN_LOADERS], groups[SHOWN_LOADERS:]
    parts: list[RenderableType] = [head, _table(shown)]
    if hidden:
        more = sum(group.loaders for group in hidden)
        parts.append(Text(f"  … and {more} more loaders that waited less", style="dim"))
    times = Counter(group.stats.name for group in shown)
    for group in shown:
        stats = group.stats
        # Two of one name differ in their workers at least, and most readers know one by how much it delivered.
        mark = f" ({stats.batches:,} batches, {stats.workers} workers)" if times[stats.name] > 1 else ""
        parts.append(_verdict_line(group, f"{group.title}{mark}: " if len(shown) > 1 else ""))
    return Group(*parts)


def verdict(loader: LoaderStats, loaders: int = 1) -> str:
    """What held this loader up and what would help, in one sentence.

    Args:
        loaders: how many loaders' figures ``loader`` is the sum of.
    """
    alive = _alive_s(loader)
    share = loader.wait_s / alive if alive > 0 else 0.0
    if not loader.batches:
        return "not one batch was delivered"
    if share < WAIT_IS_FINE:
        return "loading is not the bottleneck"
    waited = f"the trainer waited {_percent(share, 1)} of the time for data"
    busy, _, blocked = _worker_shares(loader)
    if start := _start(loader, loaders):
        return f"{waited}, {start}"
    if blocked > WORKERS_ARE_BLOCKED:
        return f"{waited}, the workers for memory: a larger TORCHCREW_BUDGET or smaller batches would help"
    if busy > WORKERS_ARE_BUSY:
        return f"{waited}: more workers or a cheaper __getitem__ would help"
    return f"{waited} though the workers had time: a larger prefetch_factor would help"


def _start(loader: LoaderStats, loaders: int) -> str:
    """What to say of the workers' start if most of the waiting was for first batches; else an empty string.

    ``first_batch_s`` is each loader's first epoch only: with more epochs, more starts can only be supposed.
    """
    first = format_seconds(loader.first_batch_s)
    if loader.first_batch_s > loader.wait_s / 2:
        most = "nearly all of it" if loader.first_batch_s > NEARLY_ALL * loader.wait_s else "most of it"
        if loaders > 1:
            said = f"{most} for the first batches of {loaders} loaders ({first}), the workers' start: one loader"
            return f"{said} for all epochs with persistent_workers=True, {_OR_ZYGOTE}, makes it cheaper"
        said = f"{most} for the first batch ({first}), the workers' start"
        return f"{said}: persistent_workers=True, {_OR_ZYGOTE}, makes later ones cheaper"
    if loader.epochs > loaders and loader.first_batch_s / loaders * loader.epochs > loader.wait_s / 2:
        first = format_seconds(loader.first_batch_s / loaders)
        return f"probably at each epoch's start (first batch: {first}): persistent_workers=True would help"
    return ""


def _groups(loaders: Sequence[LoaderStats]) -> list[_Group]:
    """Loaders of one name and number of workers together, those that waited most first."""
    together: dict[tuple[str, int], list[LoaderStats]] = {}
    for loader in loaders:
        together.setdefault((loader.name, loader.workers), []).append(loader)
    groups = [_Group(_sum(members), len(members)) for members in together.values()]
    return sorted(groups, key=lambda group: group.stats.wait_s, reverse=True)


def _sum(loaders: Sequence[LoaderStats]) -> LoaderStats:
    begin = min(loader.started_at for loader in loaders)
    return replace(
        loaders[0],
        epochs=sum(loader.epochs for loader in loaders),
        batches=sum(loader.batches for loader in loaders),
        bytes=sum(loader.bytes for loader in loaders),
        wait_s=sum(loader.wait_s for loader in loaders),
        first_batch_s=sum(loader.first_batch_s for loader in loaders),
        busy_s=sum(loader.busy_s for loader in loaders),
        idle_s=sum(loader.idle_s for loader in loaders),
        blocked_s=sum(loader.blocked_s for loader in loaders),
        started_at=begin,
        ended_at=begin + sum(_alive_s(loader) for loader in loaders),
    )


def child_line(loaders: Sequence[LoaderStats], rank: str | None, pid: int) -> str:
    """One line about a child process, or an empty string where there is nothing to say."""
    used = [loader for loader in loaders if loader.batches]
    if not used:
        return ""
    slowest = _groups(used)[0]
    who = f"rank {rank}, pid {pid}" if rank is not None else f"pid {pid}"
    batches = sum(loader.batches for loader in used)
    return f"torchcrew  {who}: {batches:,} batches; {slowest.title}: {verdict(slowest.stats, slowest.loaders)}"


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


def _table(groups: Sequence[_Group]) -> Table:
    table = Table(box=None, padding=(0, 0, 0, 1), header_style="dim")
    table.add_column("loader", overflow="ellipsis", no_wrap=True, max_width=16)
    for title in ("", "batches", "data", "waited", "", "first", "busy", "idle", "blocked"):
        table.add_column(title, justify="right", no_wrap=True)
    for group in groups:
        loader = group.stats
        table.add_row(
            loader.name if group.loaders == 1 else f"{loader.name}\n  ×{group.loaders} loaders",
            f"×{loader.workers}",
            f"{loader.batches:,}",
            format_bytes(loader.bytes),
            format_seconds(loader.wait_s),
            _percent(loader.wait_s, _alive_s(loader)),
            format_seconds(loader.first_batch_s),
            *(_percent(share, 1) for share in _worker_shares(loader)),
        )
    return table


def _verdict_line(group: _Group, name: str) -> RenderableType:
    sentence = verdict(group.stats, group.loaders)
    style = "green" if sentence == "loading is not the bottleneck" else "yellow"
    line = Table.grid(padding=(0, 1))  # two columns, so that a long sentence wraps beside the arrow
    line.add_row("  →", Text.assemble(name, (sentence, style)))
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
