"""Programs that save files, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

from rekindle.common.os_errors import explain
from rekindle.files import flush
from rekindle.memory.files_dir import FilesDir
from tests import forked

__all__ = ["KILLED", "arrives", "dies_with_its_agent", "run"]

KILLED = -signal.SIGKILL
_HEAD = "import os, signal, sys\nfrom contextlib import suppress\nimport rekindle\n"
_DIES_WITH_ITS_AGENT = """
from rekindle.files import client
client._LOOK_EVERY = 1000.0  # a look would start another agent, which finds nothing left to do and lives
SAVES
with suppress(ChildProcessError):
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
os.kill(os.getpid(), signal.SIGKILL)
"""


def dies_with_its_agent(saves: str) -> str:
    """A program that saves, and waits for its only child, an agent that dies at a point, or that has died by now."""
    return _DIES_WITH_ITS_AGENT.replace("SAVES", saves)


def run(code: str, *arguments: Any, point: str = "", timeout: float = 120.0, fresh: bool = False) -> int:
    """Runs a program until its end. Returns its exit code. One that is ``fresh`` has loaded nothing before."""
    environment = {**os.environ, "REKINDLE_FAILPOINT": point}
    if fresh:
        command = [sys.executable, "-c", _HEAD + code, *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    else:
        done = forked.run(forked.Code(_HEAD + code), *arguments, env=environment, timeout=timeout)
    assert done.returncode in (0, KILLED), done.stderr
    return done.returncode


def arrives(store: FilesDir) -> None:
    """Returns once storage has all that memory has: another program comes, and an agent with it."""
    try:
        flush(timeout=60.0)
    except OSError as error:
        raise AssertionError(f"{explain(error)}: {store.paths.agent_log.read_text()}") from error
