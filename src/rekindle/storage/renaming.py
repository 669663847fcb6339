"""Follows placeholders that programs rename before the files arrive for which they stand."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from rekindle.memory.kept import Kept, KeptFile, key_of
from rekindle.storage.path_place import LONGEST_PLACEHOLDER, NOT_THERE, PathPlace, around

__all__ = ["come_here", "note_placing", "renamed_to", "was_taken"]


def renamed_to(place: PathPlace, mark: str) -> Path | None:
    """Returns the path of the placeholder with this mark, which is not in its place; None if it is found nowhere.

    Any name in its directory is looked at, and its own name in directories beside that one, above, and below. Raises
    OSError.
    """
    return next((path for path in around(place.path) if _holds(path, mark)), None)


def come_here(kept: Kept, place: PathPlace) -> KeptFile | None:
    """Returns the file of another path whose placeholder was renamed to this one; None where there is at most a copy.

    Raises OSError, FormatError.
    """
    stands = place.standing()
    other = kept.marked(stands) if stands else None
    if other is None or other.key == key_of(place.target):
        return None
    target = other.read_receipt().target
    return None if target != place.target and PathPlace(Path(target)).standing() == stands else other


def note_placing(kept: Kept, place: PathPlace) -> None:
    """Notes in place of which placeholder a file is about to be put at a path. Raises OSError."""
    if stands := place.standing():
        kept.note_placed(key_of(place.target), stands)


def was_taken(kept: Kept, place: PathPlace, mark: str) -> bool:
    """True if this node has put a file in place of the placeholder with this mark, which is not at the path any more.

    A later save counts on it, and was committed when it had gone: that goes there as one without a placeholder.
    """
    return bool(mark) and kept.placed(key_of(place.target)) == mark


def _holds(path: Path, mark: str) -> bool:
    with suppress(*NOT_THERE):
        info = os.lstat(path)
        small = stat.S_ISREG(info.st_mode) and info.st_size <= LONGEST_PLACEHOLDER
        return small and PathPlace(path).standing() == mark
    return False
