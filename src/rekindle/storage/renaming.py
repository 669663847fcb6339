"""Follows placeholders that programs rename before the files arrive for which they stand."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rekindle.storage.path_place import LONGEST_PLACEHOLDER, PathPlace

__all__ = ["renamed_to"]

_NOT_THERE = (FileNotFoundError, NotADirectoryError, PermissionError)
"""Errors of what can't be looked at, now and later. Any other is one of storage, and says nothing."""


def renamed_to(place: PathPlace, mark: str) -> Path | None:
    """Returns the path of the placeholder with this mark; None while it is in its place, or if it is found nowhere.

    Any name in its directory is looked at, and its own name in directories beside that one, above, and below. A file
    that has taken its place has replaced it. Raises OSError.
    """
    stands = place.standing()
    if not mark or stands == mark or (stands is None and place.identify() is not None):
        return None
    return next((path for path in _candidates(place.path) if _holds(path, mark)), None)


def _candidates(path: Path) -> Iterator[Path]:
    above = path.parent
    beside, further = _entries(above), _entries(above.parent)
    yield from (Path(entry.path) for entry in beside if entry.is_file(follow_symlinks=False))
    yield above.parent / path.name
    for entry in (*further, *beside):
        if entry.is_dir(follow_symlinks=False):
            yield Path(entry.path, path.name)


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    with suppress(*_NOT_THERE), os.scandir(directory) as entries:
        return [entry for entry in entries if not entry.name.startswith(".rekindle-")]
    return []


def _holds(path: Path, mark: str) -> bool:
    with suppress(*_NOT_THERE):
        info = os.lstat(path)
        small = stat.S_ISREG(info.st_mode) and info.st_size <= LONGEST_PLACEHOLDER
        return small and PathPlace(path).standing() == mark
    return False
