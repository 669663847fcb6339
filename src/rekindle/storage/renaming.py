"""Follows placeholders that programs rename before the files arrive for which they stand."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from rekindle.memory.kept import Identity, Kept, KeptFile, key_of
from rekindle.storage.path_place import LONGEST_PLACEHOLDER, NOT_THERE, PathPlace, around

__all__ = ["come_here", "note_placing", "renamed_to", "was_replaced"]


def renamed_to(place: PathPlace, mark: str, *, replaced: bool) -> Path | None:
    """Returns the path of the placeholder with this mark; None while it is in its place, or if it is found nowhere.

    Any name in its directory is looked at, and its own name in directories beside that one, above, and below.
    ``replaced``: True if a file at the path is none that arrived in place of the placeholder. Raises OSError.
    """
    stands = place.standing()
    if not mark or stands == mark or (stands is None and place.identify() is not None and not replaced):
        return None
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


def note_placing(kept: Kept, place: PathPlace, identity: Identity) -> None:
    """Notes what is about to be put at a path, if a placeholder was there that a save may just count on.

    Raises OSError.
    """
    key = key_of(place.target)
    before = kept.placed(key)
    if before or place.standing():
        kept.note_placed(key, [identity, *_shown(place.shows(), before)])


def was_replaced(kept: Kept, place: PathPlace) -> bool:
    """True if a file is at the path, where a placeholder was, that this node has not put there. Raises OSError.

    It is told by its size and time: some file systems change the inode by a rename.
    """
    key = key_of(place.target)
    placed = kept.placed(key)
    found = place.shows()
    placed += kept.placed(key)  # it may just arrive
    return found is not None and not _shown(found, placed)


def _shown(found: Identity | None, placed: list[Identity]) -> list[Identity]:
    """Returns one of the identities that is that of the file found; none where there is no such."""
    return [identity for identity in placed if found is not None and identity[1:] == found[1:]][:1]


def _holds(path: Path, mark: str) -> bool:
    with suppress(*NOT_THERE):
        info = os.lstat(path)
        small = stat.S_ISREG(info.st_mode) and info.st_size <= LONGEST_PLACEHOLDER
        return small and PathPlace(path).standing() == mark
    return False
