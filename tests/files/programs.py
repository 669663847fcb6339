"""Programs that save files, in processes of their own. Those that save bytes never hold torch: they start at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

from rekindle.common.os_errors import explain
from rekindle.files import flush
from rekindle.memory.files_dir import FilesDir

__all__ = ["DIES_WITH_ITS_AGENT", "KILLED", "arrives", "run"]

KILLED = -signal.SIGKILL
_HEAD = "import os, signal, sys\nfrom contextlib import suppress\nimport rekindle\n"
DIES_WITH_ITS_AGENT = """
with suppress(ChildProcessError):
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
os.kill(os.getpid(), signal.SIGKILL)
"""
"""End of a program that waits for its only child, an agent that dies at a point, or that has died by now."""


def run(code: str, *arguments: Any, point: str = "", timeout: float = 120.0) -> int:
    """Runs a program until its end. Returns its exit code."""
    environment = {**os.environ, "REKINDLE_FAILPOINT": point}
    command = [sys.executable, "-c", _HEAD + code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode in (0, KILLED), done.stderr
    return done.returncode


def arrives(store: FilesDir) -> None:
    """Returns once storage has all that memory has: another program comes, and an agent with it."""
    try:
        flush(timeout=60.0)
    except OSError as error:
        raise AssertionError(f"{explain(error)}: {store.paths.agent_log.read_text()}") from error
