"""Gives every test marked ``gpu`` a process of its own: an error of a device stays pending for all that comes after.

The process of the whole run never uses the device. It skips tests by name where there is none.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_INSIDE = "REKINDLE_GPU_TEST"
"""Set in the process of one test."""
_LIMIT = 150
"""Seconds for one test, less than the time limit of pytest-timeout, so that its output is seen."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if os.environ.get(_INSIDE) or pyfuncitem.get_closest_marker("gpu") is None:
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    try:
        done = subprocess.run(
            command,
            cwd=pyfuncitem.config.rootpath,
            env={**os.environ, _INSIDE: "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_LIMIT,
        )
    except subprocess.TimeoutExpired as late:
        text = (late.stdout or b"").decode(errors="replace")
        pytest.fail(f"no end after {_LIMIT} s:\n{text}", pytrace=False)
    if done.returncode:
        pytest.fail(f"its process has ended with {done.returncode}:\n{done.stdout}", pytrace=False)
    if " passed" not in done.stdout:
        reasons = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
        pytest.skip(reasons[-1] if reasons else f"its process ran nothing: {done.stdout[-200:]}")
    return True
