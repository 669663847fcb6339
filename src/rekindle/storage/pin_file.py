"""Writes and finds the file that pins a checkpoint in a directory."""

from __future__ import annotations

import os
from pathlib import Path

from rekindle.format.names import PINNED
from rekindle.storage import disk

__all__ = ["has_pin", "write_pin"]


def write_pin(directory: Path) -> None:
    """Pins the checkpoint in ``directory``. The pin is durable on return."""
    if not has_pin(directory):  # else it may be a link, whose target is not ours to truncate
        fd = disk.create(directory / PINNED)
        try:
            disk.fsync(fd)
        finally:
            os.close(fd)
    disk.sync(directory)


def has_pin(directory: Path) -> bool:
    """Returns True if the checkpoint in ``directory`` is pinned."""
    try:
        os.lstat(directory / PINNED)
    except FileNotFoundError:
        return False
    return True
