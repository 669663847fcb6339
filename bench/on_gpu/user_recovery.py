"""Experiments on a user's job that is killed: the time until it trains again, and the state with which it does."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from on_gpu.places import Places
from on_gpu.results import NotMeasured, Report

__all__ = ["tell_recovery", "two_ranks", "user_recovery"]

_JOB = Path(__file__).resolve().parents[1] / "user_job.py"
_STEPS = 100_000
"""Steps of a job that is ended before."""
_TORCH = "torchrun, torch.save"


def user_recovery(
    report: Report,
    places: Places,
    *,
    width: int,
    layers: int,
    batch: int,
    tokens: int,
    every: int,
    device: str = "cuda",
    kills: int = 2,
    ways: Sequence[str] = ("rekindle run", _TORCH),
) -> None:
    """``kills``: under Rekindle; once under another launcher, which takes longer."""
    options = {"shape": [width, layers, batch, tokens, device], "every": every}
    bounds = {"rekindle run": 4.0}
    for name in ways:
        if report.has_time(40 if device != "cpu" else 10, name):
            with report.part(name):
                count = kills if name == "rekindle run" else 1
                _kill(report, places, name, options, ranks=1, kills=count, bound=bounds.get(name))


def two_ranks(
    report: Report,
    places: Places,
    *,
    width: int,
    layers: int,
    batch: int,
    tokens: int,
    every: int,
    device: str = "cuda",
) -> None:
    options = {"shape": [width, layers, batch, tokens, device], "every": every}
    _kill(report, places, "rekindle run", options, ranks=2, kills=2, bound=None)


def _kill(
    report: Report, places: Places, name: str, options: dict[str, Any], *, ranks: int, kills: int, bound: float | None
) -> None:
    """Train under a launcher, and kill the last rank again and again."""
    from launched import Launched
    from scratch import Failed

    key = name.replace(" ", "-").replace(",", "")
    cpu = options["shape"][-1] == "cpu"
    env = {"CUDA_VISIBLE_DEVICES": "" if cpu else os.environ.get("CUDA_VISIBLE_DEVICES")}
    memory = Path(places.memory) / key
    try:
        with Launched(
            name,
            Path(places.disk) / key,
            memory,
            _STEPS,
            json.dumps(options),
            job=_JOB,
            ranks=ranks,
            limit=max(report.left - 15, 1),  # it is ended from here: its processes are in sessions of their own
            env=env,
        ) as job:
            job.run_to(options["every"] + 2)  # each way has a checkpoint by then
            for number in range(kills):
                if number and not report.has_time(25 if not cpu else 1, f"{name}: kill {number + 1}"):
                    break
                tell_recovery(report, f"{name}: kill {number + 1}", job.strike((ranks - 1,)), job.digests, bound)
    except Failed as error:
        raise NotMeasured(f"the job came back: {error}") from error


def tell_recovery(
    report: Report, name: str, found: dict[str, Any], digests: set[tuple[int, int, str]], bound: float | None
) -> None:
    """Add the figures of one kill. Raises NotMeasured unless each rank went on with the state that it had."""
    known = {(rank, step): digest for rank, step, digest in digests}
    for rank, restored in found["restored"].items():
        step = restored["step"]
        report.require(step > 0, f"{name}: rank {rank} restored a step, and did not begin at 0")
        report.require((rank, step) in known, f"{name}: rank {rank} had completed step {step}, which it restored")
        same = known[rank, step] == restored["digest"]
        report.require(same, f"{name}: rank {rank} restored step {step} bit for bit")
    report.figure(f"{name}: SIGKILL to the first new step", found["seconds"], "s", high=bound)
    parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in found["parts"].items())
    report.figure(f"{name}: parts, s", parts)
    report.figure(f"{name}: restart", f"{'warm' if found['warm'] else 'cold'}, {found['starts']} start(s)")
    report.figure(f"{name}: completed steps that were lost", found["lost"], "steps")
