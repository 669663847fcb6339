"""Runs the tests that need a device, as an experiment among the others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from on_gpu.places import Places
from on_gpu.results import Report

__all__ = ["run_tests"]

_REPO = Path(__file__).resolve().parents[2]


def run_tests(report: Report, places: Places) -> None:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.gpu", "-p", "no:cacheprovider"],
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
    outcomes = re.findall(r"^(tests/\S+?::.+?) (PASSED|FAILED|SKIPPED|ERROR)", text, re.MULTILINE)
    for word in ("PASSED", "FAILED", "SKIPPED", "ERROR"):
        count = sum(outcome == word for _, outcome in outcomes)
        if word in ("FAILED", "ERROR"):
            report.figure(word.lower(), count, "tests", high=0)
        else:
            report.figure(word.lower(), count, "tests")
    for name, outcome in outcomes:
        if outcome in ("FAILED", "ERROR"):
            report.figure(name, outcome.lower())
    report.raw("output", text.splitlines()[-200:])
