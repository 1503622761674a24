"""The demo's picture: speed and waiting, the same loss reached sooner, memory over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchcrew.cli.demo_rounds import EngineSummary, Run

__all__ = ("draw",)

COLOURS = {"stock": "#8a94a6", "torchcrew": "#e4572c"}
INK, FAINT = "#22262e", "#dfe3ea"
LABELS = {"stock": "torch.utils.data", "torchcrew": "torchcrew.data"}
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
}
SMOOTHING = 9
"""Batches in the running mean of the loss curves."""


def draw(
    summaries: dict[str, EngineSummary],
    runs: dict[str, list[Run]],
    memory_runs: dict[str, Run],
    title: str,
    path: Path,
) -> None:
    """Write the PNG.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    with pyplot.rc_context(STYLE):  # type: ignore[arg-type]
        figure, axes = pyplot.subplots(1, 4, figsize=(14, 4.2), width_ratios=(1, 1, 1.9, 1.9), layout="constrained")
        _bars(axes[0], "Images per second", {name: s.images_per_s for name, s in summaries.items()}, "{:,.0f}")
        _bars(axes[1], "Waiting for data", {name: 100 * s.wait_share for name, s in summaries.items()}, "{:.0f} %")
        _losses(axes[2], runs)
        _memory(axes[3], memory_runs)
        handles = [Patch(color=COLOURS[name]) for name in summaries]
        figure.legend(handles, [LABELS[name] for name in summaries], loc="outside lower center", ncols=2, frameon=False)
        figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")
        figure.savefig(path, dpi=130, facecolor="white")
        pyplot.close(figure)


def _bars(axes: Any, title: str, values: dict[str, float], text: str) -> None:
    bars = axes.bar(list(values), list(values.values()), color=[COLOURS[name] for name in values], width=0.62)
    axes.bar_label(bars, [text.format(value) for value in values.values()], padding=3, fontsize=11, fontweight="bold")
    axes.set_title(title)
    axes.set_ylim(0, 1.15 * max(*values.values(), 1e-9))
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="x", length=0)


def _losses(axes: Any, runs: dict[str, list[Run]]) -> None:
    for name, of_engine in runs.items():
        for run in of_engine:
            times = [at - run.result["started_at"] for at in run.result["loss_at"]]
            axes.plot(times, _smooth(run.result["losses"]), color=COLOURS[name], linewidth=1.6)
            axes.plot(times[-1], _smooth(run.result["losses"])[-1], "o", color=COLOURS[name], markersize=5)
    axes.set_title("Training loss: the same values, at other times")
    _frame(axes, "seconds")


def _memory(axes: Any, runs: dict[str, Run]) -> None:
    for name, run in runs.items():
        times, sizes = zip(*run.memory, strict=True) if run.memory else ((), ())
        axes.plot(times, [size / 1e6 for size in sizes], color=COLOURS[name], linewidth=1.6)
    axes.set_title("Memory of all processes (PSS), MB")
    _frame(axes, "seconds")


def _frame(axes: Any, xlabel: str) -> None:
    axes.set_xlabel(xlabel)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)


def _smooth(values: list[float]) -> list[float]:
    """Running mean over the last `SMOOTHING` values."""
    return [
        sum(window) / len(window) for window in (values[max(0, i - SMOOTHING + 1) : i + 1] for i in range(len(values)))
    ]
