"""Identifies the file system that holds a root, to tell a deleted root from one that isn't mounted.

A ``RootIdentity`` is a list with an entry for the root and for each directory above it, up to ``/``. An entry is None
where there is no directory, else ``[inode, device, file system id, begins a mount]``.
"""

from __future__ import annotations

import os
from pathlib import Path

from rekindle.memory.notes import DirectoryIdentity, RootIdentity

__all__ = ["shows_deletion", "identify_root"]


def identify_root(root: Path) -> RootIdentity:
    """Returns the identity of ``root`` as it is now. Raises OSError where a directory above it can't be read."""
    mounts = [_mount_id(path) for path in (root, *root.parents)]
    entries: RootIdentity = []
    for index, path in enumerate((root, *root.parents)):
        above = mounts[index + 1] if index + 1 < len(mounts) else None
        entries.append(_entry(path, int(mounts[index] != above)))
    return entries


def _entry(path: Path, begins: int) -> DirectoryIdentity | None:
    try:
        info = os.stat(path)
        return [info.st_ino, info.st_dev, os.statvfs(path).f_fsid, begins]
    except (FileNotFoundError, NotADirectoryError):
        return None


def _mount_id(path: Path) -> str | None:
    """Returns a text that is equal for paths of one mount at one moment; None where there is no such path.

    Device numbers would not do: they don't tell a bind mount from its source.
    """
    try:
        fd = os.open(path, getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="utf-8") as file:
            return next(line for line in file if line.startswith("mnt_id:"))
    except (OSError, StopIteration):  # not Linux, or no /proc
        return str(os.fstat(fd).st_dev)
    finally:
        os.close(fd)


def shows_deletion(then: RootIdentity | None, now: RootIdentity) -> bool:
    """True if a root that had checkpoints ``then`` and has none ``now`` is on the same file system: they were deleted.

    Going up from the root, the first directory that is unchanged decides, if no mount begins below it, then or now:
    everything below it was removed or made since. Where a mount began first, it may just not be mounted.
    """
    if then is None or len(then) != len(now):
        return False
    for old, new in zip(then, now, strict=True):
        if old is None:
            return False
        if new is not None and _is_same_directory(old, new):
            return True
        if old[3] or (new is not None and new[3]):
            return False
    return False


def _is_same_directory(old: DirectoryIdentity, new: DirectoryIdentity) -> bool:
    """True if two entries are of the same directory.

    None of the three numbers will do alone: a device number is given again to the next mount, and every tmpfs begins
    with inode 1. A file system that is mounted again may get another device, and keeps its id if it has one.
    """
    return old[0] == new[0] and old[2] == new[2] and (old[2] != 0 or old[1] == new[1])
