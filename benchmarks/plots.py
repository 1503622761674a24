"""The pictures of the docs, from the JSON of the last results: of speed for most groups, and two of curves.

    python -m benchmarks.plots [--results FOLDER] [--out FOLDER]

Needs matplotlib (extra ``demo``); without it, or without results, it says so and draws nothing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import GROUPS, NAMES
from benchmarks.harness import COPY, OURS, RESULTS, ROOT, STOCK, console
from benchmarks.tables import figure, times

__all__ = ("ASSETS", "draw_all", "load")

ASSETS = ROOT / "docs" / "assets"
INK, FAINT, SOFT = "#22262e", "#dfe3ea", "#5f6877"
COLOURS = {STOCK: "#8a94a6", OURS: "#e4572c"}
#: By the group of the benchmarks that has such a picture: the file, the title, and what is compared with.
PICTURES = {
    "data": ("speedup.png", "torchcrew.data beside torch's DataLoader", "torch.utils.data"),
    "launching": ("speedup-launching.png", "torchcrew.launch beside mp.spawn", "torch.multiprocessing.spawn"),
    "multiprocessing": ("speedup-processes.png", "torchcrew beside torch.multiprocessing", "torch.multiprocessing"),
}
LABELS = {STOCK: "torch.utils.data", OURS: "torchcrew.data"}
#: Of the curve of all-reduces: label, colour, style of the line.
CURVES: dict[str, tuple[str, str, Any]] = {
    STOCK: ("gloo", COLOURS[STOCK], "-"),
    OURS: ("crew, ordinary tensors", COLOURS[OURS], "-"),
    f"{OURS}, shared": ("crew, shared tensors", "#3b6fb6", "-"),
    COPY: ("a copy of the same bytes", SOFT, (0, (3, 3))),
}
STYLE = {
    "font.size": 10,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.minor.bottom": False,
    "ytick.minor.left": False,
}


def load(folder: Path) -> dict[str, Any]:
    """The results that there are, by name of the benchmark."""
    files = {name: folder / f"{name}.json" for name in NAMES}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def draw_all(results: Path = RESULTS, out: Path = ASSETS) -> None:
    """Draw what there are results for."""
    found = load(results)
    try:
        import matplotlib
    except ImportError:
        console.print("no pictures: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    out.mkdir(parents=True, exist_ok=True)
    with pyplot.rc_context(STYLE):  # type: ignore[arg-type]
        for group, names in GROUPS.items():
            results_of = [found[name] for name in names if name in found and name != "growth"]
            if results_of and group in PICTURES:
                rows = [row for result in results_of for row in result["rows"]]
                picture = _speedup(group, rows, results_of[0]["machine"], pyplot)
                _save(picture, out / PICTURES[group][0], pyplot)
        if "growth" in found:
            _save(_growth(found["growth"], pyplot), out / "growth.png", pyplot)
        if "collectives" in found:
            _save(_sizes(found["collectives"], pyplot), out / "allreduce-sizes.png", pyplot)
    if not found:
        console.print(f"no pictures: no results in {results}")


def _save(drawn: Any, path: Path, pyplot: Any) -> None:
    # Without the date and version of matplotlib, equal results give equal files.
    drawn.savefig(path, dpi=130, facecolor="white", metadata={"Software": None})
    pyplot.close(drawn)
    console.print(f"drew {path}")


# How many times faster ------------------------------------------------------------------------------------------------


def _speedup(group: str, rows: list[dict[str, Any]], machine: dict[str, Any], pyplot: Any) -> Any:
    """Bars on a logarithmic scale from 1 (stock) to the ratio, with what must be reached as a tick."""
    _, title, stock = PICTURES[group]
    rows = [row for row in rows if row["ratio"]]
    drawn, axes = pyplot.subplots(figsize=(10, 1.5 + 0.44 * len(rows)), layout="constrained")
    places = list(range(len(rows)))[::-1]
    ratios = [row["ratio"] for row in rows]
    axes.barh(places, [ratio - 1 for ratio in ratios], left=1, height=0.62, color=COLOURS[OURS], zorder=2)
    axes.axvline(1, color=COLOURS[STOCK], linewidth=2, zorder=3)
    for place, row in zip(places, rows, strict=True):
        _bar_text(axes, place, row)
    targets = [(place, _target(row)) for place, row in zip(places, rows, strict=True)]
    known = [(place, target) for place, target in targets if target is not None]
    axes.scatter(
        [target for _, target in known],
        [place for place, _ in known],
        marker="|",
        s=260,
        linewidths=2.2,
        color=INK,
        zorder=4,
        label="to be reached",
    )
    axes.set_xscale("log")
    ticks = [tick for tick in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500) if min(0.8, *ratios) <= tick <= 2 * max(ratios)]
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    # Room for a ratio to the right of the longest bar.
    axes.set_xlim(min(0.8, 0.9 * min(ratios)), 2 * max([*ratios, *(target for _, target in known)]))
    axes.set_yticks(places, [_short(row) for row in rows])
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x", color=FAINT, linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    drawn.supxlabel(
        f"times faster (memory: times less) than {stock}, the grey line; {machine['cores']} cores, torch "
        f"{machine['torch'].split('+')[0]}, medians",
        x=0.99,
        ha="right",
        fontsize=10,
        color=SOFT,
    )
    drawn.legend(loc="outside upper right", frameon=False, handletextpad=0.2)
    drawn.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")
    return drawn


def _bar_text(axes: Any, place: int, row: dict[str, Any]) -> None:
    metric = row["metric"]
    stock, ours = (figure(row["figures"][engine][metric]["median"], metric) for engine in (STOCK, OURS))
    target = _target(row) or 1
    # Behind the mark of the target where that would lie under the words.
    start = max(row["ratio"], 1, target if target < 2 * row["ratio"] else 1) * 1.06
    axes.text(start, place, times(row["ratio"]), va="center", fontweight="bold", zorder=5)
    axes.text(1.02, place, f"{stock} → {ours}", transform=axes.get_yaxis_transform(), va="center", color=SOFT)


def _target(row: dict[str, Any]) -> float | None:
    """The ratio to stock that the row has to reach."""
    for claim in row["claims"]:
        if claim["text"].endswith(" stock") and claim["target"] is not None:
            return float(claim["target"])
    return None


def _short(row: dict[str, Any]) -> str:
    work: str = row["work"]
    short = work.replace("peak memory (PSS of all processes)", "peak memory").replace(" samples, ", ", ")
    return short.replace("`", "").removesuffix(", one producer, one consumer")


# What grows with the number of workers --------------------------------------------------------------------------------


def _growth(result: dict[str, Any], pyplot: Any) -> Any:
    row = result["rows"][0]
    workers = row["workers"]
    drawn, axes = pyplot.subplots(1, 4, figsize=(14, 3.9), layout="constrained")
    panels = (
        ("batch_s", "Time a batch, ms", 1e3, True),
        ("first_s", "First batch, ms", 1e3, True),
        ("worker_pss_bytes", "PSS a worker, MB", 1e-6, False),
        ("descriptors", "Descriptors of the trainer", 1, True),
    )
    for panel, (name, title, scale, logarithmic) in zip(axes, panels, strict=True):
        for engine, series in row["series"].items():
            _curve(panel, workers, series[name], engine, scale)
        if name == "batch_s":
            ideal = [value * scale for value in row["ideal_batch_s"]]
            panel.plot(
                workers, ideal, color=SOFT, linewidth=1.2, linestyle=(0, (3, 3)), label="sleeping alone", zorder=1
            )
        _frame(panel, workers, title, logarithmic)
    handles, labels = axes[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    machine = result["machine"]
    drawn.suptitle(
        f"1 to {workers[-1]} workers with sleeping samples, {machine['cores']} cores",
        x=0.012,
        ha="left",
        fontsize=13,
        fontweight="bold",
    )
    return drawn


def _curve(panel: Any, workers: list[int], points: list[dict[str, Any]], engine: str, scale: float) -> None:
    """Medians as a line, smallest and largest as a band."""
    medians = [point["median"] * scale for point in points]
    panel.plot(
        workers, medians, color=COLOURS[engine], linewidth=2, marker="o", markersize=4, label=LABELS[engine], zorder=3
    )
    low, high = ([point[name] * scale for point in points] for name in ("min", "max"))
    panel.fill_between(workers, low, high, color=COLOURS[engine], alpha=0.18, linewidth=0, zorder=2)


def _frame(panel: Any, workers: list[int], title: str, logarithmic: bool) -> None:
    panel.set_title(title)
    panel.set_xscale("log", base=2)
    panel.set_xticks(workers, [str(number) for number in workers])
    if logarithmic:
        from matplotlib.ticker import FuncFormatter, LogLocator

        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        panel.set_ylim(0, 1.25 * panel.get_ylim()[1])
    panel.set_xlabel("workers")
    panel.grid(axis="y", color=FAINT, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(length=0)


# All-reduces by size --------------------------------------------------------------------------------------------------


def _sizes(result: dict[str, Any], pyplot: Any) -> Any:
    """Time of a call over the size of the tensor, and how many times faster than gloo that is."""
    row = next(row for row in result["rows"] if "series" in row)
    sizes, series = row["sizes"], row["series"]
    drawn, (times_panel, ratio_panel) = pyplot.subplots(
        1, 2, figsize=(11, 4.4), layout="constrained", width_ratios=(3, 2)
    )
    for name, (label, colour, style) in CURVES.items():
        points = series[name]
        medians = [point["median"] * 1e3 for point in points]
        marker = "" if name == COPY else "o"
        times_panel.plot(sizes, medians, color=colour, linestyle=style, marker=marker, markersize=4, label=label)
        low, high = ([point[end] * 1e3 for point in points] for end in ("min", "max"))
        times_panel.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
        if name not in (STOCK, COPY):
            ratios = [stock["median"] / ours["median"] for stock, ours in zip(series[STOCK], points, strict=True)]
            ratio_panel.plot(sizes, ratios, color=colour, marker="o", markersize=4)
    ratio_panel.axhline(1, color=COLOURS[STOCK], linewidth=2)
    _frame(times_panel, sizes, "Time a call, ms", True)
    _frame(ratio_panel, sizes, "Times faster than gloo", False)
    for panel, shown in ((times_panel, sizes), (ratio_panel, sizes[::3])):
        panel.set_xticks(shown, [_bytes(size) for size in shown])
        panel.set_xlabel("float32 tensor")
    machine = result["machine"]
    drawn.legend(*times_panel.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    drawn.suptitle(
        f"all_reduce of 2 ranks, {machine['cores']} cores, torch {machine['torch'].split('+')[0]}",
        x=0.012,
        ha="left",
        fontsize=13,
        fontweight="bold",
    )
    return drawn


def _bytes(size: int) -> str:
    units = ((1 << 20, "MB"), (1 << 10, "KB"))
    return next(f"{size // scale} {unit}" for scale, unit in units if size >= scale)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=str(__doc__).splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=ASSETS)
    options = parser.parse_args()
    draw_all(options.results, options.out)


if __name__ == "__main__":
    main()
