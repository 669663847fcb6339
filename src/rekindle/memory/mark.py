"""Detects that a small file was replaced, without reading it."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["Mark", "mark_of"]

Mark = tuple[int, int] | None
"""Inode and time of a file, which is replaced when its contents change; None without a file."""


def mark_of(path: Path) -> Mark:
    """Returns the identity of a file's contents; None without a file."""
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns
