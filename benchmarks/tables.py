"""Figures as text: the rich table of a run, and the words that the README's table uses as well."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ("figure", "print_table", "share", "times")

_MARKS = {True: "[green]reached[/]", False: "[bold red]missed[/]", None: "[yellow]not measured[/]"}


def figure(value: float, metric: str) -> str:
    """A figure with its unit, two or three digits."""
    if metric.endswith("_bytes"):
        return f"{value / 1e6:,.0f} MB"
    if not metric.endswith("_s"):
        return f"{value:,.3g}"
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
    scale, unit = next((pair for pair in units if value >= pair[0]), units[-1])
    shown = value / scale
    return f"{shown:.0f} {unit}" if shown >= 99.5 else f"{shown:.1f} {unit}"


def times(value: float | None) -> str:
    """A ratio."""
    if value is None:
        return "–"
    return f"{value:.0f}×" if value >= 9.95 else f"{value:.1f}×" if value >= 1.95 else f"{value:.2f}×"


def share(value: float | None) -> str:
    """A share of the floor."""
    return "–" if value is None else f"{100 * value:.0f} %"


def print_table(result: dict[str, Any], console: Console) -> None:
    """Print a benchmark's rows: engines with median and range, then floor and claims."""
    machine = result["machine"]
    title = f"{result['benchmark']}: {result['repeats']} repeats, {machine['cores']} cores, torch {machine['torch']}"
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for column in ("work", "engine", "median", "smallest", "largest", "stock / it"):
        table.add_column(column, justify="left" if column in ("work", "engine") else "right", overflow="fold")
    for row in result["rows"]:
        metric = row["metric"]
        stock = row["figures"].get("stock")
        for number, (engine, figures) in enumerate(row["figures"].items()):
            values = figures[metric]
            cells = [figure(values[name], metric) for name in ("median", "min", "max")]
            against = times(stock[metric]["median"] / values["median"]) if stock and values["median"] else "–"
            style = "bold" if engine == "torchcrew" else None
            table.add_row(f"{row['work']}, a {row['per']}" if number == 0 else "", engine, *cells, against, style=style)
        table.add_section()
    console.print(table)
    for row in result["rows"]:
        _print_verdicts(row, console)


def _print_verdicts(row: dict[str, Any], console: Console) -> None:
    console.print(f"[bold]{row['work']}[/]")
    verified = row["verified"]
    if verified:
        console.print(f"  {verified['batches']} batches hashed, equal on {', '.join(verified['engines'])}")
    if row["floor"]:
        console.print(f"  {share(row['floor_share'])} of the floor ({row['floor']})")
    for claim in row["claims"]:
        measured = "" if claim["measured"] is None else f" (measured {claim['measured']:.3g})"
        console.print(f"  {claim['text']}: {_MARKS[claim['reached']]}{measured}")
    for note in row["notes"]:
        console.print(f"  [dim]{note}[/]")
