"""Files that are there and can't be read."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def unreadable(path: Path) -> Iterator[None]:
    """As on a bad block, or to a user without the right to read it."""
    if os.geteuid():
        path.chmod(0)
        yield
        path.chmod(0o600)
        return
    memory = f"/proc/{os.getpid()}/mem"  # nothing is ever mapped at its beginning
    done = subprocess.run(["mount", "--bind", memory, str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"can't be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
