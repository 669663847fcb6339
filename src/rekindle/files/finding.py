"""Finds a file in this node's memory, and tells if it is still the one that belongs at its path."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from pathlib import Path

from rekindle.common.os_errors import explain
from rekindle.common.timeouts import with_timeout
from rekindle.errors import BusyError, CorruptError, FormatError
from rekindle.memory.files_dir import FilesDir
from rekindle.memory.kept import KeptFile, OpenFile, key_of
from rekindle.storage.open import open_place
from rekindle.storage.path_place import PathPlace
from rekindle.storage.renaming import come_here, was_taken

__all__ = ["bring_here", "find_in_memory", "renamed_here"]

log = logging.getLogger("rekindle")

_LOOK = 3.0
"""Seconds that storage gets to show what is at a path."""
_LOOKS, _PAUSE = 1000, 0.001
"""Most looks at a file that is superseded each time before it is open, and seconds between two of them."""


def find_in_memory(store: FilesDir, target: str) -> OpenFile | None:
    """Opens the file of a target in memory; None where there is none, or where the path shows another file by now.

    One with a wrong size or receipt is passed over if storage has it; else that raises CorruptError or FormatError.
    Raises BusyError where newer ones keep taking its place.
    """
    if not store.kept_path.is_dir():
        return None
    store.check()
    for _ in range(_LOOKS):
        file = store.kept.find(key_of(target))
        if file is None or not _is_current(store, file, target):
            file = None
            with suppress(OSError):  # as whoever reads the path learns
                file = renamed_here(store, target)
        if file is None:
            return None
        try:
            return store.kept.pin(file)
        except FileNotFoundError:
            time.sleep(_PAUSE)
        except (CorruptError, FormatError) as error:
            if not file.is_stored():
                raise
            log.warning("%s; storage is read instead", error)
            return None
    raise BusyError(f"{target}: is saved again and again, faster than it can be opened in memory")


def renamed_here(store: FilesDir, target: str) -> KeptFile | None:
    """Returns the file that storage is to get whose placeholder was renamed to this target, or copied there.

    Raises OSError where storage doesn't show what is at a path.
    """
    mark = _standing(target)
    return store.kept.marked(mark) if mark else None


def bring_here(store: FilesDir, place: PathPlace) -> None:
    """Lets an older file belong at a path to which its placeholder was renamed, before a newer one is written there.

    Else whoever notices the rename later would take it for the newer one. Where storage does not answer, nothing is
    done. Raises BusyError.
    """
    with suppress(OSError, FormatError):
        older = with_timeout(_LOOK, place.target, lambda: come_here(store.kept, place))
        if older is not None:
            store.retarget(older, place.target)


def _standing(target: str) -> str | None:
    place = open_place(target)
    return with_timeout(_LOOK, target, place.standing) if isinstance(place, PathPlace) else None


def _is_its_place(store: FilesDir, target: str, file: KeptFile) -> bool:
    place = PathPlace(Path(target))
    mark = file.read_receipt().mark
    if mark and place.lacks(mark):
        return place.standing() is None and was_taken(store.kept, place, mark)
    other = come_here(store.kept, place)
    return other is None or other.gives_way_to(file)


def _is_current(store: FilesDir, file: KeptFile, target: str) -> bool:
    """True unless somebody has replaced or removed what storage got of it, or another one was renamed to the target."""
    try:
        if file.is_stored():
            return with_timeout(_LOOK, target, open_place(target).identify) == file.identity()
        return "://" in target or with_timeout(_LOOK, target, lambda: _is_its_place(store, target, file))
    except (FileNotFoundError, FormatError):  # given up meanwhile, or damaged, as whoever opens it learns
        return True
    except OSError as error:
        log.warning("memory is taken for %s, as storage can't show if it is still the same: %s", target, explain(error))
        return True
