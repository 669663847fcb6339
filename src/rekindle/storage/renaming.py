"""Follows placeholders that programs rename before the files arrive for which they stand."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from rekindle.storage.path_place import LONGEST_PLACEHOLDER, NOT_THERE, PathPlace, around

__all__ = ["renamed_to"]


def renamed_to(place: PathPlace, mark: str) -> Path | None:
    """Returns the path of the placeholder with this mark; None while it is in its place, or if it is found nowhere.

    Any name in its directory is looked at, and its own name in directories beside that one, above, and below. A file
    that has taken its place has replaced it. Raises OSError.
    """
    stands = place.standing()
    if not mark or stands == mark or (stands is None and place.identify() is not None):
        return None
    return next((path for path in around(place.path) if _holds(path, mark)), None)


def _holds(path: Path, mark: str) -> bool:
    with suppress(*NOT_THERE):
        info = os.lstat(path)
        small = stat.S_ISREG(info.st_mode) and info.st_size <= LONGEST_PLACEHOLDER
        return small and PathPlace(path).standing() == mark
    return False
