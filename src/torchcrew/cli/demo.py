"""`torchcrew demo`: the same training twice, on stock's DataLoader and on ours, and what differed.

Runs alternate (stock, ours, stock, ours), each in a fresh process (`demo_rounds`); the table shows medians.
Memory comes from one shorter run of each engine at the end, because sampling it slows a run down.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from torchcrew.cli.demo_plot import draw
from torchcrew.cli.demo_rounds import ENGINES, EngineSummary, Run, RunFailed, as_json, run_once, same_results, summarise
from torchcrew.cli.report import format_bytes, format_seconds

__all__ = ("demo_command",)

SEED = 2024
MEMORY_EPOCHS = 2
"""Epochs of the runs for memory, which is level from the second epoch on."""
ROUNDS = 2
SECOND_ROUND_S = 25.0
"""Without --rounds, a first round that took longer is the only one: the demo stays short on a busy machine, too."""
NOTE_WIDTH = 28
"""Characters, so that the clock beside the notes stands still."""
MEMORY_NOTE = "* PSS leaves out stock's batches on their way: files that no process has mapped at that moment"
NEEDED = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}


def demo_command(
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each training run.")] = 8,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes of each loader.")] = 2,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Runs of each engine, alternating; the table shows medians. 2, on a busy machine 1."),
    ] = None,
    output: Annotated[Path, typer.Option(dir_okay=False, help="Where the plot goes.")] = Path("torchcrew-demo.png"),
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Also write every figure of every run here.")
    ] = None,
) -> None:
    """Train a small CNN on real handwritten digits, first with stock's DataLoader, then with torchcrew's.

    Same seed, same number of workers: every loss and the test accuracy have to be equal to the last digit.
    """
    console = Console(highlight=False)
    _check_requirements(console)
    for path in filter(None, (output, json_file)):
        if not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"the folder of {str(path)!r} does not exist")
    try:
        runs, memory_runs = _run_all(console, epochs, workers, rounds)
    except RunFailed as error:
        console.print(Text.assemble(("The demo stopped: ", "bold red"), str(error)))
        raise typer.Exit(1) from None
    summaries = {engine: summarise(runs[engine], memory_runs[engine]) for engine in ENGINES}
    same = same_results([run for of_engine in runs.values() for run in of_engine])
    for name, is_same in same_results(list(memory_runs.values())).items():
        same[name] = same[name] and is_same
    console.print(Group(_table(summaries, same), *_conclusion(summaries, same, len(runs["stock"][0].result["losses"]))))
    title = f"Digits CNN, {epochs} epochs, {workers} workers: {_ratio(summaries):.2f}x the images per second"
    draw(summaries, runs, memory_runs, title, output)
    console.print(Text(f"  plot: {output.absolute()} (--output puts it elsewhere)"), soft_wrap=True)
    if json_file is not None:
        options = {"epochs": epochs, "workers": workers, "rounds": len(runs["stock"]), "seed": SEED}
        all_runs = [*chain.from_iterable(runs.values()), *memory_runs.values()]
        json_file.write_text(json.dumps(_document(options, summaries, all_runs, same), indent=1) + "\n")
        console.print(Text(f"  figures: {json_file.absolute()}"), soft_wrap=True)
    if not all(same.values()):
        raise typer.Exit(1)


def _check_requirements(console: Console) -> None:
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        command = Text("pip install 'torchcrew[demo]'", style="bold")
        console.print(Text.assemble(f"The demo needs {' and '.join(missing)}: ", command))
        raise typer.Exit(1)


def _run_all(
    console: Console, epochs: int, workers: int, rounds: int | None
) -> tuple[dict[str, list[Run]], dict[str, Run]]:
    """The runs for time and the runs for memory, of each engine."""
    console.print("[bold]torchcrew demo[/]: a small CNN learns scikit-learn's 1,797 handwritten digits")
    with console.status("reading the digits"):
        from torchcrew.cli.demo_digits import load_digit_arrays

        digits = load_digit_arrays().to_bytes()
    columns = (
        TextColumn("  {task.description}"),
        BarColumn(bar_width=24, complete_style="cyan", finished_style="green"),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    runs: dict[str, list[Run]] = {engine: [] for engine in ENGINES}
    memory_runs: dict[str, Run] = {}
    with Progress(*columns, console=console) as progress:

        def run(engine: str, what: str, epochs: int, sample_memory: bool) -> Run:
            task = progress.add_task(f"{engine:<9} {what:<7}", total=None, note="starting")
            spec = {"engine": engine, "epochs": epochs, "workers": workers, "seed": SEED}
            done = run_once(spec, digits, _follow(progress, task), sample_memory=sample_memory)
            note = f"{done.images_per_s:,.0f} images/s, waited {done.wait_share:.0%}"
            if sample_memory:
                note = f"peak {format_bytes(done.peak_bytes)}"
            progress.update(task, note=f"{note:<{NOTE_WIDTH}}")
            progress.stop_task(task)
            return done

        started = time.monotonic()
        for number in range(1, (rounds or ROUNDS) + 1):
            if rounds is None and number > 1 and time.monotonic() - started > SECOND_ROUND_S:
                progress.console.print("  this machine is busy: one round only, so take the times with care")
                break
            for engine in ENGINES:
                runs[engine].append(run(engine, f"round {number}", epochs, sample_memory=False))
        for engine in ENGINES:
            memory_runs[engine] = run(engine, "memory", min(epochs, MEMORY_EPOCHS), sample_memory=True)
    return runs, memory_runs


def _follow(progress: Progress, task: TaskID) -> Callable[[dict[str, Any]], None]:
    """A function that shows a run's events in its bar."""

    def show(event: dict[str, Any]) -> None:
        if "steps" in event:
            progress.update(task, total=event["steps"], note="training")
        else:
            note = f"loss {event['loss']:.3f}, waited {format_seconds(event['waited'])}"
            progress.update(task, completed=event["done"], note=f"{note:<{NOTE_WIDTH}}")

    return show


def _table(summaries: dict[str, EngineSummary], same: dict[str, bool]) -> Table:
    stock, ours = summaries["stock"], summaries["torchcrew"]
    table = Table(box=None, padding=(0, 2), header_style="bold", caption=MEMORY_NOTE, caption_justify="left")
    table.add_column("")
    for name in ("stock", "torchcrew", "ratio"):
        table.add_column(name, justify="right")
    table.add_column("")

    def row(
        name: str, show: Callable[[float], str], theirs: float, our: float, *, more_is_better: bool = False
    ) -> None:
        table.add_row(name, show(theirs), show(our), *_comparison(theirs, our, more_is_better=more_is_better))

    row("time to the first batch", format_seconds, stock.first_batch_s, ours.first_batch_s)
    row("images per second", "{:,.0f}".format, stock.images_per_s, ours.images_per_s, more_is_better=True)
    row("waited for data", format_seconds, stock.wait_s, ours.wait_s)
    row("  share of training time", "{:.1%}".format, stock.wait_share, ours.wait_share)
    row("peak memory, all processes *", format_bytes, stock.peak_bytes, ours.peak_bytes)
    verdict = Text("equal", style="green") if same["accuracy"] else Text("DIFFERENT", style="bold red")
    table.add_row("test accuracy", f"{stock.accuracy:.4%}", f"{ours.accuracy:.4%}", "", verdict)
    return table


def _comparison(theirs: float, our: float, *, more_is_better: bool) -> tuple[Text, Text]:
    """Our figure in units of theirs, and what that means: for some figures more is better, for others less."""
    ratio = f"{our / theirs:.2f}x" if theirs else "-"
    if ratio == "1.00x" or our == theirs:
        return Text(ratio), Text("equal")
    word, style = ("better", "green") if (our > theirs) == more_is_better else ("worse", "yellow")
    return Text(ratio, style=style), Text(word, style=style)


def _conclusion(summaries: dict[str, EngineSummary], same: dict[str, bool], batches: int) -> list[Text]:
    if all(same.values()):
        result = Text(
            f"  accuracy equal; all {batches} losses and the trained weights too, to the last bit", style="green"
        )
    else:
        wrong = ", ".join(name for name, is_same in same.items() if not is_same)
        result = Text(
            f"  NOT equal: {wrong}. The two engines must give the same batches; please report this.", "bold red"
        )
    return [Text(), result]


def _ratio(summaries: dict[str, EngineSummary]) -> float:
    return summaries["torchcrew"].images_per_s / summaries["stock"].images_per_s


def _document(
    options: dict[str, int], summaries: dict[str, EngineSummary], runs: list[Run], same: dict[str, bool]
) -> dict[str, Any]:
    """What ``--json`` writes."""
    from importlib.metadata import version

    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": version("torch"),
    }
    return {
        "options": options,
        "machine": machine,
        "equal": same,
        "medians": {engine: asdict(summary) for engine, summary in summaries.items()},
        "runs": [as_json(run) for run in runs],
    }
