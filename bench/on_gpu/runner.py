"""Runs experiments one after the other, each in a process of its own with a limit, and gathers what became of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from on_gpu.cases import end_after, find_work
from on_gpu.experiments import Experiment
from on_gpu.places import Places, clear
from on_gpu.results import NotMeasured, Outcome, Report, read_report

__all__ = ["run_all", "run_one", "work_here"]

_SCRIPT = Path(__file__).resolve().parents[1] / "gpu.py"
_SHORTEST = 15.0
"""Seconds without which no experiment is begun: importing torch and opening a device take half of them."""
_MARGIN = 5.0
"""Seconds before its limit by which an experiment is told to have ended."""
_GONE = 20.0
"""Seconds that a killed process gets to be gone."""


def run_all(
    experiments: Iterable[Experiment],
    places: Places,
    seconds: float,
    tell: Callable[[Outcome], object],
    runs: Callable[[Experiment, Places, float], Outcome] | None = None,
) -> list[Outcome]:
    """Run all of them within ``seconds``. ``tell`` gets each outcome as it comes."""
    deadline, outcomes = time.monotonic() + seconds, []
    for experiment in experiments:
        left = deadline - time.monotonic()
        if left < _SHORTEST:
            outcome = Outcome(experiment.name, "left out", detail="no time left")
        else:
            outcome = (runs or run_one)(experiment, places, min(experiment.budget, left))
        outcomes.append(outcome)
        tell(outcome)
    return outcomes


def run_one(experiment: Experiment, places: Places, limit: float, options: Mapping[str, Any] | None = None) -> Outcome:
    """Run an experiment in a process, which is killed after ``limit`` seconds. What it has measured by then counts."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as own, (Path(own) / "errors").open("w+b") as errors:
        path = Path(own) / "report"
        task = {"options": {**experiment.options, **(options or {})}, "places": asdict(places)}
        task |= {"report": str(path), "seconds": max(limit - _MARGIN, 0.0)}
        process = subprocess.Popen(
            [sys.executable, str(_SCRIPT), "work", experiment.work, json.dumps(task)],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            start_new_session=True,  # its own processes are ended with it
        )
        try:
            process.wait(limit)
            status, detail = ("done", "") if process.returncode == 0 else ("failed", _ending(process.returncode))
        except subprocess.TimeoutExpired:
            status, detail = "out of time", f"killed after {limit:.0f} s"
        finally:
            detail_of_end = _end(process)
            clear(places)
        if status != "done":
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()[-12:]
            detail = "\n".join(filter(None, [detail, detail_of_end, *lines]))
        found = read_report(path)
    if status == "done" and not found.proofs:
        found.failures.append(f"nothing was measured of: {experiment.subject}")
    if found.failures:
        status = "failed" if status == "done" else status
        detail = "\n".join(filter(None, [*found.failures, detail]))
    seconds = time.monotonic() - began
    return Outcome(experiment.name, status, seconds, detail, found.figures, found.raw, found.proofs)


def _ending(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _end(process: subprocess.Popen[bytes]) -> str:
    """Kill all that is left of an experiment's processes. Returns a remark if they would not go."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    try:
        process.wait(_GONE)
    except subprocess.TimeoutExpired:
        return f"process {process.pid} was killed, and is still there after {_GONE:.0f} s: the device may be stuck"
    return ""


def work_here(work: str, task: Mapping[str, Any]) -> None:
    """Be the process of an experiment."""
    report = Report(Path(task["report"]), task["seconds"])

    def whole() -> None:
        try:
            find_work(work)(report, Places(**task["places"]), **task["options"])
        except NotMeasured as error:
            report.failure(str(error))

    end_after(whole)
