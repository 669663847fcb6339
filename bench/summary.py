"""Summarises the samples: medians of each contender, slopes of growth, and the table of targets."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any, NamedTuple

from sizes import MIB

__all__ = ["Reach", "reach", "reach_growth", "slope", "summarize", "summarize_growth"]

Runs = dict[str, list[dict[str, Any]]]


def summarize(raw: dict[str, Any]) -> dict[str, Any]:
    """Of one size. Parts that were not run are empty."""
    return {
        "saves": {name: _saves(turns) for name, turns in raw.get("saves", {}).items() if turns},
        "loads": {way: _loads(turns) for way, turns in raw.get("loads", {}).items() if turns},
        "loop": {name: _loop(turns) for name, turns in raw.get("loop", {}).items() if turns},
        "drain": _drain(raw["drain"]) if raw.get("drain") else {},
    }


def _saves(turns: list[dict[str, Any]]) -> dict[str, float]:
    """``first_*`` is of the first saves, ``later_*`` of all others."""
    first = [turn["samples"][0] for turn in turns]
    later = [sample for turn in turns for sample in turn["samples"][1:]]
    size = turns[0]["state_bytes"]
    found: dict[str, float] = {"setup": median(turn["setup"] for turn in turns)}
    for when, samples in (("first", first), ("later", later)):
        for key in ("call", "wait", "stall", "step_longer", "durable", "lost"):
            found[f"{when}_{key}"] = median(sample[key] for sample in samples)
        found[f"{when}_stall_per_copy"] = median(sample["stall"] / sample["floor"] for sample in samples)
        found[f"{when}_stall_max"] = max(sample["stall"] for sample in samples)
    found["floor"] = median(sample["floor"] for sample in first + later)
    found["durable_gb_per_s"] = size / 1e9 / found["later_durable"]
    for key in ("peak", "shared", "held"):
        found[f"memory_{key}"] = median(turn["memory"][key] for turn in turns)
    found["held_per_state"] = found["memory_held"] / size
    found["skipped"] = sum(turn["skipped"] for turn in turns)
    return found


def _loads(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """``*_per_copy`` divides what it took by a copy of as many bytes: into fresh memory for the first load of a
    process, into memory that is there for the second one.
    """
    keys = ("cold", "warm", "cold_floor", "warm_floor", "fresh_floor", "disk_read", "started")
    found: dict[str, Any] = {key: median(turn[key] for turn in turns) for key in keys}
    found["cold_per_copy"] = median(turn["cold"] / turn["fresh_floor"] for turn in turns)
    found["warm_per_copy"] = median(turn["warm"] / turn["warm_floor"] for turn in turns)
    found["cold_per_disk"] = median(turn["cold"] / turn["disk_read"] for turn in turns)
    return {**found, "by": turns[0]["by"]}


def _loop(turns: list[dict[str, Any]]) -> dict[str, float]:
    pairs = [pair for turn in turns for pair in turn["pairs"]]
    return {
        "plain": median(pair["plain"] for pair in pairs),
        "slower": median(pair["saving"] - pair["plain"] for pair in pairs),
        "in_copies": median((pair["saving"] - pair["plain"]) / pair["floor"] for pair in pairs),
        "share": median(pair["saving"] / pair["plain"] - 1 for pair in pairs),
        "held": max(turn["held"] for turn in turns),
        "skipped": sum(turn["skipped"] for turn in turns) / sum(turn["saves"] for turn in turns),
    }


def _drain(turns: list[dict[str, Any]]) -> dict[str, Any]:
    samples = [sample for turn in turns for sample in turn["samples"]]
    gigabytes = turns[0]["state_bytes"] / 1e9
    return {
        "gb_per_s": median(gigabytes / sample["drain"] for sample in samples),
        "disk_gb_per_s": median(gigabytes / sample["disk"] for sample in samples),
        "of_disk": median(sample["disk"] / sample["drain"] for sample in samples),
        "by": turns[0]["by"],
    }


# -- growth -------------------------------------------------------------------------------------------------------


def _stall(costs: list[dict[str, float]]) -> float:
    return median(cost["call"] + cost["wait"] for cost in costs)


def _point(point: dict[str, Any]) -> dict[str, float]:
    return {
        "tensors": point["tensors"],
        "bytes": point["bytes"],
        "call": median(cost["call"] for cost in point["overlapped"]),
        "stall": _stall(point["overlapped"]),
        "at_once": _stall(point["at_once"]),
        "copy": median(point["floors"]),
        "load": point["load"],
    }


def slope(points: list[tuple[float, float]]) -> float:
    """Least squares."""
    middle_x, middle_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    square = sum((x - middle_x) ** 2 for x, _ in points)
    return sum((x - middle_x) * (y - middle_y) for x, y in points) / square if square else float("nan")


def summarize_growth(raw: dict[str, Any]) -> dict[str, Any]:
    """Seconds, over what grows. ``per_tensor`` is the slope of ``step()``'s time over tensors."""
    series = [[_point(point) for point in run["points"]] for run in raw["tensors"]]
    history = raw["history"]["samples"]
    return {
        "tensors": [
            {
                "bytes": points[0]["bytes"],
                "points": points,
                "per_tensor": slope([(p["tensors"], p["call"]) for p in points]),
            }
            for points in series
        ],
        "bytes": [_point(point) for point in raw["bytes"]],
        "ranks": [_rank_point(ranks) for ranks in raw["ranks"]],
        "history": [_history_point(history, range(*window)) for window in _decades(len(history))],
    }


def _rank_point(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """A step is as slow as its slowest rank."""
    steps = zip(*(rank["costs"] for rank in ranks), strict=True)
    stall = median(max(cost["call"] + cost["wait"] for cost in costs) for costs in steps)
    return {"ranks": len(ranks), "bytes": ranks[0]["bytes"], "stall": stall}


def _decades(count: int) -> Iterable[tuple[int, int]]:
    """1, 2 to 10, 11 to 100 and so on, as ranges of indices."""
    begin, end = 0, 1
    while begin < count:
        yield begin, min(end, count)
        begin, end = end, end * 10


def _history_point(samples: list[dict[str, float]], window: range) -> dict[str, float]:
    taken = [samples[index] for index in window]
    return {
        "saves": window.stop,
        "call": median(cost["call"] for cost in taken),
        "stall": _stall(taken),
        "durable": median(cost["durable"] for cost in taken),
    }


# -- what must be reached -----------------------------------------------------------------------------------------


class Reach(NamedTuple):
    """One row: ``measured`` must be at most, or at least, ``limit``."""

    what: str
    target: str
    measured: float
    shown: str
    met: bool


def _most(what: str, target: str, measured: float, limit: float, shown: str) -> Reach:
    return Reach(what, target, measured, shown.format(measured), measured <= limit)


def _least(what: str, target: str, measured: float, limit: float, shown: str) -> Reach:
    return Reach(what, target, measured, shown.format(measured), measured >= limit)


def reach(summary: dict[str, Any]) -> list[Reach]:
    """Every row that the parts that were run can tell."""
    return [*_reach_saving(summary), *_reach_loading(summary["loads"])]


def reach_growth(summary: dict[str, Any]) -> list[Reach]:
    """The row of each series over tensors."""
    return [
        _most(
            f"step() for each more tensor, {series['bytes'] / MIB:,.0f} MiB in all",
            *("under 2 µs", series["per_tensor"] * 1e6, 2, "{:.2f} µs"),
        )
        for series in summary["tensors"]
    ]


def _reach_saving(summary: dict[str, Any]) -> Iterable[Reach]:
    saves, loop, drain = summary["saves"], summary["loop"], summary["drain"]
    ours, other = saves.get("Rekindle"), saves.get("dcp.async_save")
    if ours and other:
        for when in ("first", "later"):
            times = other[f"{when}_stall"] / ours[f"{when}_stall"]
            yield _least(
                f"stall, overlapped, {when} saves", "at most 1/50 of dcp.async_save", times, 50, "1/{:.1f} of it"
            )
    at_once = saves.get("Rekindle, overlap=False")
    if at_once:
        for when in ("first", "later"):
            copies = at_once[f"{when}_stall_per_copy"]
            yield _most(f"stall, not overlapped, {when} saves", "at most 1.15 copies", copies, 1.15, "{:.2f} copies")
    for name, what in (("Rekindle, snapshots only", "without drain"), ("Rekindle", "drain included")):
        if name in loop:
            copies = loop[name]["in_copies"]
            yield _most(f"a snapshot at every step, {what}", "at most 1 copy a step (CPU)", copies, 1, "{:.2f} copies")
    if drain:
        yield _least("drain", f"at least 0.9 of {drain['by']}", drain["of_disk"], 0.9, "{:.2f} of it")
    if ours:
        yield _most("memory held", "at most 2.1 states", ours["held_per_state"], 2.1, "{:.2f} states")


def _reach_loading(loads: dict[str, Any]) -> Iterable[Reach]:
    memory, storage, dcp = (loads.get(way) for way in ("Rekindle, memory", "Rekindle, storage", "dcp.load"))
    if memory:
        for when, into in (("warm", "into memory that is there"), ("cold", "in a new process")):
            speed = 1 / memory[f"{when}_per_copy"]
            yield _least(f"load from memory, {into}", "at least 0.8 of a copy's speed", speed, 0.8, "{:.2f} of it")
            if dcp:
                times = dcp[when] / memory[when]
                yield _least(f"load from memory, {into}", "at least 3 x dcp.load", times, 3, "{:.1f} x")
        yield _most(
            "rank killed to first new step", "process start + 1 s", memory["cold"], 1, "process start + {:.2f} s"
        )
    if storage:
        speed = 1 / storage["cold_per_disk"]
        yield _least("load from storage, cold", f"at least 0.9 of {storage['by']}", speed, 0.9, "{:.2f} of it")
