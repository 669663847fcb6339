"""The identity of the file system that holds a root: it tells a root that was deleted from one that isn't mounted.

A trace is a list with an entry for the root and for each directory above it, up to ``/``. An entry is None where there
is no directory, else ``[inode, device, file system id, begins a mount]``.
"""

from __future__ import annotations

import os
from pathlib import Path

from rekindle.memory.notes import DirectoryIdentity, RootIdentity

__all__ = ["shows_deletion", "take_trace"]


def take_trace(root: Path) -> RootIdentity:
    """Looks at every directory on the way to ``root``. Raises OSError where one can't be looked at."""
    mounts = [_mount(path) for path in (root, *root.parents)]
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


def _mount(path: Path) -> str | None:
    """What is equal on paths of one mount at one moment. Device numbers don't tell a bind mount from its source."""
    try:
        fd = os.open(path, getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="utf-8") as file:
            return next(line for line in file if line.startswith("mnt_id:"))
    except (OSError, StopIteration):  # no Linux, or no /proc
        return str(os.fstat(fd).st_dev)
    finally:
        os.close(fd)


def shows_deletion(then: RootIdentity | None, now: RootIdentity) -> bool:
    """Whether a root whose checkpoints could be seen ``then`` is on the same file system ``now``.

    Going up from the root, the first directory that is the one that it was decides, if no mount begins below it, now or
    then: everything below it has been removed, or was put there since. Where a mount begins first, it may be missing.
    """
    if then is None or len(then) != len(now):
        return False
    for old, new in zip(then, now, strict=True):
        if old is None:
            return False
        if new is not None and _same(old, new):
            return True
        if old[3] or (new is not None and new[3]):
            return False
    return False


def _same(old: DirectoryIdentity, new: DirectoryIdentity) -> bool:
    """A number of a device is given again to what is mounted next, and every tmpfs begins with inode 1: none of the
    three will do alone. A file system that is mounted again may have another device, and keeps its id, if it has one.
    """
    return old[0] == new[0] and old[2] == new[2] and (old[2] != 0 or old[1] == new[1])
