"""Draws what each interval wastes, with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rekindle.cli.advice import Advice, Level
from rekindle.common.durations import describe_seconds
from rekindle.common.os_errors import describe_error
from rekindle.errors import RekindleError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["FORMATS", "draw"]

FORMATS = (".png", ".svg")
_TICKS = (1e-3, 1e-2, 0.1, 1, 10, 60, 600, 3600, 6 * 3600, 86400, 10 * 86400, 100 * 86400)
_LEAST = 1e-5
"""Share below which nobody cares."""


def draw(advice: Advice, title: str, path: Path) -> None:
    """Writes a picture of all levels' curves. Raises RekindleError without matplotlib, or where it can't write."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  an extra
        from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator  # noqa: PLC0415
    except ImportError as error:
        raise RekindleError(f"--plot needs matplotlib ({error}): pip install matplotlib, or rekindle[plot]") from error
    figure = Figure(figsize=(5.2 * len(advice.levels), 4.2), layout="constrained")
    figure.suptitle(title, fontsize=10)
    for axes, level in zip(figure.subplots(1, len(advice.levels), squeeze=False)[0], advice.levels, strict=True):
        _draw_level(axes, level)
        axes.xaxis.set_major_locator(FixedLocator(_TICKS))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: describe_seconds(seconds)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise RekindleError(f"{path}: {describe_error(error)}") from error


def _draw_level(axes: Axes, level: Level) -> None:
    curve = level.curve()
    axes.plot([x for x, _ in curve], [y for _, y in curve], color="#4269d0", label="expected")
    if level.points:
        xs, ys = [point.interval for point in level.points], [max(point.waste, _LEAST) for point in level.points]
        axes.scatter(xs, ys, color="#6b6b6b", marker="x", zorder=5, label="measured")
    if level.now is not None:
        axes.scatter([level.now], [level.waste(level.now)], color="#e8710a", zorder=4, label="now")
    best = level.waste(level.best)
    axes.scatter([level.best], [best], color="#2a8f3c", marker="D", zorder=4, label=f"better: {level.setting}")
    axes.axvspan(
        curve[0][0],
        max(level.least, curve[0][0]),
        color="#6b6b6b",
        alpha=0.12,
        lw=0,
        label=f"too often for {level.bound}",
    )
    seen = [best, *(point.waste for point in level.points if point.waste), *(waste for _, waste in curve)]
    axes.set(xscale="log", yscale="log", title=level.name)
    axes.set(xlim=(curve[0][0], curve[-1][0]), ylim=(max(0.5 * min(seen), _LEAST), 1.0))
    axes.set(xlabel="time from one to the next", ylabel="time wasted")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
