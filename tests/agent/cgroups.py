"""A control group of the kernel with little memory, which runs out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle.agent.process import _counters

_TAKE = """
import pathlib, sys
pathlib.Path(sys.argv[1], "cgroup.procs").write_text("0")
pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
taken = []
while True:
    taken.append(b"x" * (1 << 20))
"""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A group of its own. Its processes may have 60 MB."""
    first = Path("/sys/fs/cgroup/memory")
    above, limit = (first, "memory.limit_in_bytes") if first.is_dir() else (first.parent, "memory.max")
    path = above / f"rekindle-test-oom-{os.getpid()}"
    if not _counters(os.getpid()):
        pytest.skip("kills for want of memory are not counted by group here")
    try:
        path.mkdir()
        (path / limit).write_text("60000000")
    except OSError as error:
        pytest.skip(f"no control group to be had: {error}")
    yield path
    path.rmdir()


def run_out_of_memory(cgroup: Path) -> None:
    """Has the kernel kill a process in the group."""
    ended = subprocess.run([sys.executable, "-c", _TAKE, str(cgroup)], timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL
