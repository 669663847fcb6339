"""Experiment on snapshots of a state that is written in every way that training knows: right, refused, never torn."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from on_gpu.cases import Case
from on_gpu.held import snapshots_in_memory, values
from on_gpu.places import Places, clear
from on_gpu.results import Report

__all__ = ["CASES", "GASPS", "updates"]

_AT_ONCE = 4
_REFUSABLE = "right, or refused with a message"
_SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
_STEPS = 8
"""Updates of a case; each but the last has a snapshot that is looked at."""

CASES = {
    # A case that compiles takes longest: it begins first.
    "compiled, reduce-overhead": "right",
    "compiled after, fullgraph": _REFUSABLE,
    "graph captured before, replayed": _REFUSABLE,
    "update in backward, step() does nothing": _REFUSABLE,
    "through .data": _REFUSABLE,
    "optimizer on a side stream, not waited for": _REFUSABLE,
    "optimizer on a side stream, waited for before the next forward": _REFUSABLE,
    "optimizer on a side stream, waited for": "right",
    "graph captured after, replayed": _REFUSABLE,
    "graph captured before, inside of updating()": "right",
    "freed and given back during the copy": _REFUSABLE,
    "eager": "right",
    "foreach": "right",
    "fused": "right",
    "on a stream of its own": "right",
    "optimizer in backward": "right",
    "expandable segments": "right",
    "pluggable allocator": "right",
}
"""What is expected of each. "Right" is every snapshot; one that is refused needs a message."""
GASPS = ("gasp amid a replayed graph", "gasp amid a replayed graph, inside of updating()")


class _Found(NamedTuple):
    said: dict[str, Any]
    ending: str
    errors: str
    code: int | None = None
    held: dict[int, tuple[float, float]] = {}
    """Of a gasp: what memory holds, by step."""


def updates(report: Report, places: Places, *, size: int, device: str = "cuda", cases: list[str] | None = None) -> None:
    """``cases``: names of those to try, by default all."""
    names = cases or [*CASES, *GASPS]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        jobs = [
            (name, pool.submit(_run, report, places, number, name, size, device)) for number, name in enumerate(names)
        ]
        for name, job in jobs:
            with report.part(name):
                found = job.result()
                if found is None:
                    report.left_out(name, "no time left")
                elif name in GASPS:
                    judge_gasp(report, name, found)
                else:
                    judge(report, name, found)


def _run(report: Report, places: Places, number: int, name: str, size: int, device: str) -> _Found | None:
    """Run one case, in places of its own."""
    if report.left < 15:
        return None
    own = replace(places, memory=f"{places.memory}/{number}", huge=None, disk=f"{places.disk}/{number}")
    for path in (own.memory, own.disk):
        Path(path).mkdir()
    work = "dying_process" if name in GASPS else "writing_process"
    options = {"name": name, "memory": own.memory, "disk": own.disk, "size": size, "device": device}
    options |= {} if name in GASPS else {"steps": _STEPS}
    env = _SEGMENTS if name == "expandable segments" else {}
    with Case(f"on_gpu.writers:{work}", options, env) as case:
        case.listen(report.left - 5)
        code = case.exit_code(min(30.0, report.left - 3)) if name in GASPS else None
        held = snapshots_in_memory(f"{own.disk}/run", own.memory) if name in GASPS else {}
        looked = {step: values(path, "model.") for step, path in held.items()}
        found = _Found(case.said, case.ending, case.errors(), code, looked)
    clear(own)  # the memory has no room for the snapshots of all cases
    return found


def judge(report: Report, name: str, found: _Found) -> None:
    """Add what became of one case. Raises NotMeasured unless it was updated as often as its steps say."""
    said = found.said
    report.require(found.ending == "done" and "seen" in said, f"the case ends: it {found.ending}: {found.errors}")
    seen, messages = {step: tuple(pair) for step, pair in said["seen"] if pair is not None}, said["messages"]
    asked, (low, high) = len(said["seen"]), said["live"]
    finished = asked == _STEPS - 1
    report.require(finished or bool(messages), f"{_STEPS - 1} snapshots were asked for: {asked}")
    report.require(low == high and (low == _STEPS or not finished), f"each step updated everything: {said['live']}")
    wrong = {step: pair for step, pair in seen.items() if pair != (step, step)}
    missing = asked - len(seen)
    report.require(bool(seen) or bool(messages), "a snapshot of a step asked for, or a message that refuses it")
    shown = f"{len(seen) - len(wrong)} of {asked} right"
    shown += f", WRONG: {wrong}" if wrong else ""
    shown += f", {missing} refused" if missing else ""
    shown += f" ({messages[0][:160]})" if messages else ""
    refused = bool(missing) or not finished
    met = not wrong and (not refused or (CASES[name] == _REFUSABLE and bool(messages)))
    report.figure(name, shown, expected=CASES[name], met=met)


def judge_gasp(report: Report, name: str, found: _Found) -> None:
    """Add what a notice amid a replayed graph has secured. Raises NotMeasured unless it came amid an update."""
    said = found.said
    report.require("busy" in said, f"a notice came: the process {found.ending}: {found.errors}")
    report.require(said["live"] == [3, 3], f"three updates were made before: {said['live']}")
    report.require(said["busy"], "the replayed update was still running when the notice came")
    report.require(found.code is not None, "the process ended after the notice")
    wrong = {step: pair for step, pair in found.held.items() if pair != (step, step)}
    right = sorted(found.held.keys() - wrong.keys())
    shown = f"WRONG: {wrong}" if wrong else f"step {right[-1]}, right" if right else "none"
    report.figure(name, shown, expected="a right step, or none", met=not wrong)
    report.figure(f"{name}: exit code", str(found.code), expected="143", met=found.code == 143)
