"""Plots of a run, each as PNG and SVG. Needs matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from sizes import MIB

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter

__all__ = ["draw", "draw_files", "draw_recovery"]

_OURS, _OTHERS, _FLOOR = "#c8452d", "#6b7a8f", "#2d2d2d"
_PLAIN = FuncFormatter(lambda value, _: f"{value:,.10g}")


def draw(document: dict[str, Any], directory: Path) -> list[Path]:
    """Files written."""
    made: list[Path] = []
    for size, found in document["sizes"].items():
        name, summary = size.replace(" ", ""), found["summary"]
        if summary["saves"]:
            with _figure(directory / f"stall-{name}", made) as axes:
                _stall(axes, size, summary["saves"])
        if summary["loop"]:
            with _figure(directory / f"loop-{name}", made) as axes:
                _loop(axes, size, summary["loop"])
        if summary["loads"]:
            with _figure(directory / f"load-{name}", made) as axes:
                _load(axes, size, summary["loads"])
    if document["growth"]:
        with _figure(directory / "growth", made, (2, 2), (9, 6.5)) as panels:
            _growth(panels.flat, document["growth"]["summary"])
    return made


def draw_recovery(bars: dict[str, dict[str, float]], directory: Path) -> list[Path]:
    """Draw the seconds of each part of each recovery, one after the other. Files written."""
    made: list[Path] = []
    with _figure(directory / "recovery", made, inches=(8, 0.8 + 0.3 * len(bars))) as axes:
        rows, left = list(range(len(bars))), [0.0] * len(bars)
        parts = list(dict.fromkeys(part for found in bars.values() for part in found))
        for number, part in enumerate(parts):
            seconds = [found[part] for found in bars.values()]
            axes.barh(rows, seconds, 0.6, left=left, label=part, color=plt.get_cmap("viridis")(number / len(parts)))
            left = [before + more for before, more in zip(left, seconds, strict=True)]
        axes.set_yticks(rows, list(bars))
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.3)
        axes.axvline(1, color=_FLOOR, linewidth=1, linestyle="--")
        axes.set_xlabel("seconds since the SIGKILL, medians of each part; dashed: the goal")
        axes.legend(fontsize=7)
    return made


def draw_files(turns: dict[str, list[dict[str, Any]]], directory: Path) -> list[Path]:
    """Draw the first and the later saves by a path, and loads, of each contender. Files written."""
    made: list[Path] = []
    names = [kind.replace("rekindle.save", "Rekindle") for kind in turns]
    with _figure(directory / "files", made, (1, 2), (8, 2.2)) as (saves, loads):
        first = [statistics.median(one["first"] for one in done) for done in turns.values()]
        later = [statistics.median(seconds for one in done for seconds in one["next"]) for done in turns.values()]
        _bars(saves, names, first, later)
        copies = [one["copy"] for done in turns.values() for one in done]
        saves.axvline(statistics.median(copies), color=_FLOOR, linewidth=1, linestyle="--", label="one copy in memory")
        saves.set_xlabel("seconds of a save, pale: the first save, solid: later ones")
        saves.legend(loc="best", fontsize=7)
        _bars(loads, names, None, [statistics.median(one["load"] for one in done) for done in turns.values()])
        loads.set_xlabel("seconds of a load, verified by Rekindle")
    return made


@contextmanager
def _figure(
    path: Path, made: list[Path], shape: tuple[int, int] = (1, 1), inches: tuple[float, float] = (8, 3.6)
) -> Iterator[Any]:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Text stays text, and the same figures give the same file.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "rekindle", "font.size": 9, "axes.axisbelow": True})
    figure, axes = plt.subplots(*shape, figsize=inches, layout="constrained")
    yield axes
    for ending, settings in (("png", {"dpi": 140}), ("svg", {"metadata": {"Date": None}})):
        file = path.with_name(f"{path.name}.{ending}")
        figure.savefig(file, **settings)
        made.append(file)
    plt.close(figure)


def _colors(names: list[str]) -> list[str]:
    return [_OURS if name.startswith("Rekindle") else _OTHERS for name in names]


def _bars(axes: Any, names: list[str], pale: list[float] | None, solid: list[float]) -> None:
    rows = list(range(len(names)))
    if pale is not None:
        axes.barh([row - 0.2 for row in rows], pale, 0.36, color=_colors(names), alpha=0.4)
    axes.barh([row + (0.2 if pale else 0) for row in rows], solid, 0.36, color=_colors(names))
    axes.set_yticks(rows, names)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)


def _stall(axes: Any, size: str, saves: dict[str, Any]) -> None:
    names = list(saves)
    _bars(
        axes,
        names,
        [saves[name]["first_stall"] * 1e3 for name in names],
        [saves[name]["later_stall"] * 1e3 for name in names],
    )
    floor = min(s["floor"] for s in saves.values()) * 1e3
    axes.axvline(floor, color=_FLOOR, linewidth=1, linestyle="--", label="one copy in memory")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(_PLAIN)
    axes.set_xlabel("ms that a save stalls training, pale: the first save, solid: later ones")
    axes.set_title(f"Stall of a save, {size}")
    axes.legend(loc="best")


def _loop(axes: Any, size: str, loop: dict[str, Any]) -> None:
    names = list(loop)
    _bars(axes, names, None, [max(loop[name]["in_copies"], 0) for name in names])
    axes.axvline(1, color=_FLOOR, linewidth=1, linestyle="--", label="one copy in memory")
    axes.set_xscale("symlog", linthresh=1)
    axes.xaxis.set_major_formatter(_PLAIN)
    axes.set_xlabel("longer by, in copies of the state")
    axes.set_title(f"A step of training with a save at every step, {size}")
    axes.legend(loc="best")


def _load(axes: Any, size: str, loads: dict[str, Any]) -> None:
    names = [name for name in loads if " of async" not in name and "overlap" not in name]
    _bars(axes, names, [loads[name]["cold"] * 1e3 for name in names], [loads[name]["warm"] * 1e3 for name in names])
    axes.axvline(loads[names[0]]["warm_floor"] * 1e3, color=_FLOOR, linewidth=1, linestyle="--", label="one copy")
    axes.axvline(loads[names[0]]["disk_read"] * 1e3, color=_FLOOR, linewidth=1, linestyle=":", label="one direct read")
    axes.set_xlabel("ms, pale: in a new process, files not in the page cache, solid: again")
    axes.set_title(f"Load, {size}")
    axes.legend(loc="best")


def _growth(panels: Any, summary: dict[str, Any]) -> None:
    tensors, nbytes, ranks, history = panels
    for series, style in zip(summary["tensors"], ("-", "--", ":"), strict=False):
        size = f"{series['bytes'] / MIB:,.0f} MiB"
        counts = [p["tensors"] for p in series["points"]]
        _line(tensors, counts, series["points"], "call", f"step(), {size}", style)
        _line(tensors, counts, series["points"], "stall", f"and wait, {size}", style, _OTHERS)
    _finish(tensors, "tensors")
    sizes = [p["bytes"] / MIB for p in summary["bytes"]]
    _line(nbytes, sizes, summary["bytes"], "stall", "step() and wait", "-")
    _line(nbytes, sizes, summary["bytes"], "at_once", "overlap=False", "-", _OTHERS)
    _line(nbytes, sizes, summary["bytes"], "copy", "one copy", "--", _FLOOR)
    _finish(nbytes, "MiB")
    _line(ranks, [p["ranks"] for p in summary["ranks"]], summary["ranks"], "stall", "step() and wait", "-")
    ranks.set_ylim(bottom=0)
    _finish(ranks, "ranks, the same bytes in all", "linear")
    saves = [p["saves"] for p in summary["history"]]
    _line(history, saves, summary["history"], "stall", "step() and wait", "-")
    _line(history, saves, summary["history"], "durable", "until durable", "-", _OTHERS)
    _finish(history, "saves, all checkpoints kept")


def _line(axes: Any, x: list[float], points: Any, key: str, label: str, style: str, color: str = _OURS) -> None:
    axes.plot(x, [p[key] * 1e3 for p in points], style, marker="o", markersize=3, color=color, label=label)


def _finish(axes: Any, label: str, scale: str = "log") -> None:
    if not any(len(line.get_xdata()) for line in axes.lines):  # no scale fits nothing
        axes.set_axis_off()
        return
    axes.set_xscale(scale)
    axes.set_yscale(scale)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(_PLAIN)
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(label)
    axes.set_ylabel("ms")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
