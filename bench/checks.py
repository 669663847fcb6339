"""Checks what must hold in every run, however slow the machine. The smoke run fails when it doesn't."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from parts import SMOKE
from registry import LOADS

__all__ = ["check"]


def check(document: dict[str, Any], parts: tuple[str, ...]) -> list[str]:
    """Returns a line for each violation. Every load has been verified by the worker that did it."""
    wrong = [f"no number: {path}" for path, value in _numbers(document) if not math.isfinite(value)]
    for label, found in document["sizes"].items():
        wrong += [f"{label}: {what}" for what in _check_size(found, document["skipped"], parts)]
    if not document["sizes"]:
        wrong.append(f"nothing was measured: {document['skipped']}")
    if "growth" in parts:
        wrong += _check_growth(document["growth"])
    return wrong


def _numbers(node: Any, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(node, dict):
        for key, child in node.items():
            yield from _numbers(child, f"{path}/{key}")
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from _numbers(child, f"{path}/{index}")
    elif isinstance(node, (int, float)):
        yield path, node


def _check_size(found: dict[str, Any], skipped: dict[str, str], parts: tuple[str, ...]) -> Iterator[str]:
    raw, size = found["raw"], found["bytes"]
    if "stall" in parts or "load" in parts:
        names = [name for name in SMOKE.contenders if name not in skipped]
        yield from (f"{name} did not save" for name in names if not raw["saves"].get(name))
    if "load" in parts:
        ways = [way for way, load in LOADS.items() if load.writer in SMOKE.contenders and load.writer not in skipped]
        yield from (f"{way} did not load" for way in ways if not raw["loads"].get(way))
    if "loop" in parts:
        yield from (f"{name} did not train" for name in SMOKE.loop if name not in skipped and not raw["loop"].get(name))
    if "drain" in parts and not all(sample["drain"] > 0 for turn in raw["drain"] for sample in turn["samples"]):
        yield "a drain took no time"
    for name, turns in raw.get("saves", {}).items():
        yield from (f"{name}: {what}" for turn in turns for what in _check_turn(name, turn, size))


def _check_turn(name: str, turn: dict[str, Any], size: int) -> Iterator[str]:
    samples = turn["samples"]
    if not 0.9 * size < turn["state_bytes"] <= 1.01 * size:
        yield f"the state has {turn['state_bytes']} bytes"
    if len({sample["fingerprint"] for sample in samples}) != SMOKE.saves + 1:
        yield "the state did not change between saves"
    if any(sample["stall"] > sample["durable"] + sample["wait"] for sample in samples):
        yield "durable before the call returned"
    if name.startswith("Rekindle") and not 1 < turn["memory"]["held"] / size <= 3.15:
        yield f"{turn['memory']['held']} bytes are held in memory"


def _check_growth(growth: dict[str, Any]) -> Iterator[str]:
    summary, raw = growth["summary"], growth["raw"]
    if len(summary["tensors"]) != len(SMOKE.tensor_bytes) or len(summary["bytes"]) != len(SMOKE.bytes):
        yield "growth: points are missing"
    if [len(ranks) for ranks in raw["ranks"]] != list(SMOKE.ranks):
        yield "growth: ranks are missing"
    if len(raw["history"]["samples"]) != SMOKE.history:
        yield "growth: saves are missing"
