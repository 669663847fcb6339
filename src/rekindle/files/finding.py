"""Finds a file in this node's memory, and tells if it is still the one that belongs at its path."""

from __future__ import annotations

import logging
import time

from rekindle.common.os_errors import explain
from rekindle.common.timeouts import with_timeout
from rekindle.errors import BusyError, CorruptError, FormatError
from rekindle.memory.files_dir import FilesDir
from rekindle.memory.kept import KeptFile, OpenFile, key_of
from rekindle.storage.open import open_place

__all__ = ["find_in_memory"]

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
        if file is None or not _is_current(file, target):
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


def _is_current(file: KeptFile, target: str) -> bool:
    """True unless somebody has replaced or removed what storage got of it."""
    if not file.is_stored():
        return True
    try:
        return with_timeout(_LOOK, target, open_place(target).identify) == file.identity()
    except OSError as error:
        log.warning("memory is taken for %s, as storage can't show if it is still the same: %s", target, explain(error))
        return True
