"""Experiment on the step that is secured after a notice, by where the device was when the notice came."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

from sizes import GIB

from on_gpu.cases import Case, Speaker
from on_gpu.endings import restored
from on_gpu.places import Places, clear
from on_gpu.results import NotMeasured, Report

__all__ = ["gasp", "gasp_process"]

_DEADLINE = 25.0
"""Seconds after a fault at which a guarded process ends."""
_FOREVER = 60.0
"""Seconds of spinning that no process lives to see the end of."""


class _Phase(NamedTuple):
    """Where the device is when the notice comes. Step n is complete; n + 1 is queued."""

    name: str
    spins: str
    """before, amid or after the update of step n + 1."""
    seconds: float
    """Seconds for which it spins there."""
    wanted: tuple[str, ...]
    """Steps that may be restored: "snapshot", "n", "n + 1"."""
    size: int = 2 * GIB


_PHASES = [
    _Phase("the update queued, not begun", "before", _FOREVER, ("n",)),
    _Phase("inside of the update", "amid", _FOREVER, ("snapshot",)),
    _Phase("inside of the update, for 2 s more", "amid", 2.0, ("n + 1",)),
    _Phase("the update begins as its state is copied", "before", 0.4, ("n", "n + 1")),
    _Phase("32 GiB, after the update", "after", _FOREVER, ("n + 1",), 32 * GIB),
]


def gasp(report: Report, places: Places) -> None:
    for phase in _PHASES:
        if report.has_time(60 if phase.size > 2 * GIB else 25, phase.name):
            with report.part(phase.name):
                _measure(report, places, phase)


def _measure(report: Report, places: Places, phase: _Phase) -> None:
    own = Places(places.memory, places.huge, str(Path(places.disk) / phase.name.replace(" ", "-")), places.kind)
    options = {"memory": own.memory, "disk": own.disk, "size": phase.size}
    with Case("on_gpu.gasp:gasp_process", {**options, "spins": phase.spins, "seconds": phase.seconds}) as case:
        if not case.wait_ready(report.left - 20):
            raise NotMeasured(f"the process {case.ending}: {case.errors()}")
        case.go()
        case.listen(10, until="queued")
        sent = time.monotonic()
        case.process.send_signal(signal.SIGTERM)
        case.listen(min(_DEADLINE + 5, report.left))
        code, ended = case.exit_code(5), time.monotonic()
        said, errors = case.said, case.errors()
    report.require(bool(said.get("queued")), f"a step was queued behind a busy device: {errors}")
    report.require(0 < said["snapshot"] < said["n"], "a step was complete after the newest snapshot")
    report.require(said["busy"], "the device was busy when the notice came")
    _tell(report, phase, said, {"sent": sent, "ended": ended, "code": code}, own)
    clear(places)  # two slots of each phase are more than the memory has


def _tell(report: Report, phase: _Phase, said: dict[str, Any], times: dict[str, Any], places: Places) -> None:
    found = restored(places, phase.size, report.left)
    names = {said["snapshot"]: "snapshot", said["n"]: "n", said["n"] + 1: "n + 1"}
    step = names.get(found["step"], f"step {found['step']}")
    torn = not found["low"] == found["high"] == found["step"]
    shown = f"{step}{', TORN' if torn else ''}, from {found['source']}"
    met = step in phase.wanted and not torn
    report.require(found["step"] > 0, "a step was restored")
    report.figure(phase.name, shown, expected=f"{' or '.join(phase.wanted)}, untorn", met=met)
    expected, high = ("0.7 s", 1.5) if phase.size > 2 * GIB else ("", None)
    if "secured" in said:
        took = said["secured"] - times["sent"]
        report.figure(f"{phase.name}: notice until secured", took, "s", expected, high=high)
    else:
        report.require(phase.wanted == ("snapshot",), "the step was secured after the notice")
    if times["code"] is None:
        raise NotMeasured("did not happen: the process ended after the notice")
    report.figure(f"{phase.name}: notice until gone", times["ended"] - times["sent"], "s")
    report.figure(f"{phase.name}: exit code", str(times["code"]), expected="143", met=times["code"] == 143)
    report.figure(f"{phase.name}: restore", found["seconds"], "s")


def gasp_process(speaker: Speaker, memory: str, disk: str, size: int, spins: str, seconds: float) -> None:
    """Train until two snapshots are in memory and two more steps are complete; then queue one behind a busy device."""
    import torch

    import rekindle
    from on_gpu.cuda import cycles_per_second, is_busy, spin
    from on_gpu.network import counting_state

    parameters, optimizer = counting_state(size)
    cycles_per_second()
    state = {"parameters": parameters, "optimizer": optimizer}
    root = Path(disk) / "run"
    ckpt = rekindle.Checkpointer(root, state, memory=memory, snapshot_every=5, persist_every=10**9, overlap=True)
    ckpt.restore()
    step = 0

    def complete() -> None:
        nonlocal step
        step += 1
        optimizer.step()
        ckpt.step(step)

    with ckpt.guard(
        watchdog=False, gasp_deadline=_DEADLINE, on_gasp=lambda at: speaker.say(secured=time.monotonic(), at=at)
    ):
        while ckpt.metrics.saves < 2 or step % 5 != 2:
            complete()
            torch.cuda.synchronize()
            time.sleep(0.05)
        newest = ckpt.latest()
        speaker.say(snapshot=newest.step if newest else 0, n=step)
        speaker.ready()
        if spins == "before":
            spin(seconds)
        elif spins == "amid":
            optimizer.amid = lambda: spin(seconds)
        complete()
        if spins == "after":
            torch.cuda.synchronize()
            spin(seconds)
        speaker.say(busy=is_busy(), queued=True)
        time.sleep(_FOREVER)
