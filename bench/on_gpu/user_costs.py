"""Experiment on what saving takes from a user's job: Rekindle with all its defaults, and what comes with torch."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sizes import MIB

from on_gpu.cases import Case, Speaker
from on_gpu.places import Places
from on_gpu.results import NotMeasured, Report

__all__ = ["WAYS", "paired_process", "user_job"]

WAYS = {
    "Rekindle, all defaults": "rekindle",
    "dcp.async_save": "dcp",
    "dcp.async_save, stager kept": "stager",
    "torch.save": "torch",
}
"""The first one has no interval: it chooses its own."""
_PLAIN = 0.3
"""Share of the steps of a window with saves that a window without has."""


class _Step:
    """The times of one window's steps."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._marks: list[Any] = []
        self.calls: list[float] = []
        """Seconds for which the host stood in the call that saves, and in the wait before the update."""

    def mark(self) -> None:
        import torch

        if not self._cuda:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Of each step: on a device of its own clock, so that nobody waits for it between two steps."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._cuda:
            return [before.elapsed_time(after) / 1e3 for before, after in pairs]
        return [after - before for before, after in pairs]


def _window(job: Any, steps: int, saver: Any, every: int) -> dict[str, Any]:
    """Train for so many steps, from the first of which on there may be saves."""
    from on_gpu.cuda import synchronize

    times = _Step(job.shape.device != "cpu")
    synchronize()
    began = time.perf_counter()
    times.mark()
    for step in range(1, steps + 1):
        job.work()
        before = time.perf_counter()
        if saver is not None:
            saver.ready()
        waited = time.perf_counter() - before + job.update()
        before = time.perf_counter()
        if saver is not None and step % every == 0:
            saver.save(step)
        times.calls.append(time.perf_counter() - before + waited)
        times.mark()
    synchronize()
    return {"mean": (time.perf_counter() - began) / steps, "steps": times.seconds(), "calls": times.calls}


def _saver(way: str, job: Any, root: Path) -> Any:
    """Returns a contender. Each is as its library has it by default."""
    import contenders

    import rekindle

    class Defaults(contenders.Contender):
        def __init__(self, training: Any, root: Path) -> None:
            super().__init__(training, root)
            self.checkpointer = rekindle.Checkpointer(root, training.state)
            self.checkpointer.restore()

        def save(self, step: int) -> None:
            self.checkpointer.step(step)

        def close(self) -> None:
            self.checkpointer.close()

    class Stager(contenders.DcpStager):
        pinned = job.shape.device != "cpu"

    kinds: dict[str, Any] = {
        "rekindle": Defaults,
        "dcp": contenders.DcpAsync,
        "stager": Stager,
        "torch": contenders.TorchSave,
    }
    return kinds[way](job, root)


def _saved(way: str, saver: Any, last: int, every: int) -> dict[str, Any]:
    """Says what a window has left: the bytes of its newest save, and how many there were."""
    from on_gpu.held import snapshots_in_memory
    from on_gpu.snapshots import complete

    if way == "rekindle":
        complete(saver.checkpointer)
        held = snapshots_in_memory(saver.root, os.environ["REKINDLE_MEMORY"])
        newest = max(held, default=0)
        metrics = saver.checkpointer.metrics
        nbytes = held[newest].stat().st_size if newest else 0
        return {"newest": newest, "bytes": nbytes, "saves": metrics.saves, "every": metrics.snapshot_every}
    newest = last // every * every
    saver.ready()
    saver.finish(newest)
    path = saver.path(newest)
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {"newest": newest, "bytes": sum(f.stat().st_size for f in files), "saves": last // every, "every": every}


def paired_process(
    speaker: Speaker, way: str, disk: str, shape: list[Any], steps: int, every: int, rounds: int
) -> None:
    """Train in windows without and with saves, in alternation."""
    from on_gpu.user_model import Shape, UserJob

    job = UserJob(Shape(*shape))
    plain_steps, every = max(int(steps * _PLAIN), 5), 1 if way == "rekindle" else every
    _window(job, 5, None, 1)
    speaker.say(nbytes=job.nbytes)
    plain, saving, left = [_window(job, plain_steps, None, 1)], [], []
    for number in range(rounds):
        saver = _saver(way, job, Path(disk) / f"{way}-{number}")
        try:
            saving.append(_window(job, steps, saver, every))
            left.append(_saved(way, saver, steps, every))
        except Exception as error:
            if way == "rekindle":
                raise
            speaker.say(broke=f"{type(error).__name__}: {str(error)[:200]}")
            return
        saver.close()
        plain.append(_window(job, plain_steps, None, 1))
    # The samples are too long for one line of a pipe.
    path = Path(disk) / f"{way}.samples"
    path.write_text(json.dumps({"plain": plain, "saving": saving, "left": left}))
    speaker.say(samples=str(path))


def user_job(
    report: Report,
    places: Places,
    *,
    width: int,
    layers: int,
    batch: int,
    tokens: int,
    steps: int,
    every: int,
    rounds: int,
    device: str = "cuda",
    ways: Sequence[str] = tuple(WAYS),
) -> None:
    shape = [width, layers, batch, tokens, device]
    for name in ways:
        way, first = WAYS[name], name == "Rekindle, all defaults"
        if device == "cpu" or report.has_time(60 if first else 30, name):
            # What comes with torch takes seconds for each save: two of them show that.
            count = {"steps": steps if first else 2 * every, "rounds": rounds if first else 1, "every": every}
            with report.part(name):
                _measure(report, places, name, way, {"shape": shape, **count})


def _measure(report: Report, places: Places, name: str, way: str, options: dict[str, Any]) -> None:
    env = {"REKINDLE_MEMORY": places.memory}
    with Case("on_gpu.user_costs:paired_process", {"way": way, "disk": places.disk, **options}, env) as case:
        found = case.result(report.left)
    if "broke" in found:
        report.left_out(name, f"it broke: {found['broke']}")
        return
    samples = json.loads(Path(found["samples"]).read_text())
    for left in samples["left"]:
        saved = f"the newest save, of step {left['newest']}, has {left['bytes'] / MIB:.0f} MiB"
        report.require(left["saves"] > 0 and left["newest"] > 0, f"{name} has saved: {left}")
        report.require(left["bytes"] >= 0.9 * found["nbytes"], f"{saved} of {found['nbytes'] / MIB:.0f}")
    tell_costs(report, name, samples, 1.02 if way == "rekindle" else None)


def _middle(windows: list[dict[str, Any]]) -> float:
    return statistics.median(seconds for window in windows for seconds in window["steps"])


def tell_costs(report: Report, name: str, samples: dict[str, Any], bound: float | None) -> None:
    """Add the figures of one way. Raises NotMeasured without windows of both kinds."""
    plain, saving = samples["plain"], samples["saving"]
    if len(plain) != len(saving) + 1 or not saving:
        raise NotMeasured(f"did not happen: windows in alternation: {len(plain)} without and {len(saving)} with saves")
    report.raw(name, samples)
    neighbours = [statistics.mean(pair["mean"] for pair in plain[n : n + 2]) for n in range(len(saving))]
    ratios = [one["mean"] / base for one, base in zip(saving, neighbours, strict=True)]
    calls = [seconds for one in saving for seconds in one["calls"]]
    report.figure(f"{name}: mean step / that of plain training", statistics.mean(ratios), high=bound)
    report.figure(f"{name}: step, median", _middle(saving) * 1e3, "ms", f"{_middle(plain) * 1e3:.4g} ms plain")
    report.figure(f"{name}: step, mean", statistics.mean(one["mean"] for one in saving) * 1e3, "ms")
    report.figure(f"{name}: longest stall of the host", max(calls) * 1e3, "ms")
    last = samples["left"][-1]
    report.figure(f"{name}: saves in {len(saving[-1]['calls'])} steps", last["saves"], f"saves, every {last['every']}")
