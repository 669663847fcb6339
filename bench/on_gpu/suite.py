"""Runs the tests that need a device, as an experiment among the others."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

from on_gpu.places import Places
from on_gpu.results import NotMeasured, Report

__all__ = ["outcomes_in", "run_tests"]

_REPO = Path(__file__).resolve().parents[2]


def run_tests(report: Report, places: Places) -> None:
    command = [sys.executable, "-m", "tests.gpu", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", "4"]  # each test takes 10 s to start, and next to nothing of the device
    try:
        done = subprocess.run(
            command,
            cwd=_REPO,
            env={**os.environ, "REKINDLE_MEMORY": places.memory},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=max(report.left, 1),
        )
        text = done.stdout
    except subprocess.TimeoutExpired as late:
        text = (late.stdout or b"").decode(errors="replace")
        report.left_out("the rest", "no time left")
    report.raw("output", text.splitlines()[-300:])
    outcomes = outcomes_in(text)
    if not outcomes:
        raise NotMeasured(f"no test was run: {text[-1000:]}")
    ran = [name for name, outcome in outcomes.items() if outcome != "SKIPPED"]
    report.require(bool(ran), f"a test was run, not only skipped: {text[-300:]}")
    for word in ("PASSED", "FAILED", "SKIPPED", "ERROR"):
        count = sum(outcome == word for outcome in outcomes.values())
        if word in ("FAILED", "ERROR"):
            report.figure(word.lower(), count, "tests", high=0)
        else:
            report.figure(word.lower(), count, "tests")
    for name, outcome in outcomes.items():
        if outcome in ("FAILED", "ERROR"):
            report.figure(name, outcome.lower())


def outcomes_in(text: str) -> dict[str, str]:
    """Returns the outcomes of tests, by name, that ``pytest -v`` has told: "NAME OUTCOME", or the other way round."""
    word, name = "(PASSED|FAILED|SKIPPED|ERROR)", r"(tests/\S+?\.py::\w+(?:\[.*?\])?)"
    found = {m[1]: m[2] for m in re.finditer(f"^{name} {word}", text, re.MULTILINE)}
    return found | {m[2]: m[1] for m in re.finditer(f"{word} {name}", text)}
