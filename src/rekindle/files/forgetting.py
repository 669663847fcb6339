"""Takes files out of this node's memory, so that they never get to their paths."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from rekindle.errors import BusyError
from rekindle.files.saving import canonical_target_within
from rekindle.files.settings import current_settings
from rekindle.memory.files_dir import FilesDir
from rekindle.memory.kept import key_of

__all__ = ["forget", "wait_for_writers"]

_TURN = 3600.0
"""Seconds that somebody gets to finish writing a file."""


def forget(path: str | os.PathLike[str]) -> bool:
    """Takes the file of ``path`` out of memory, whatever storage has of it. True if it is just being written there.

    Raises OSError, BusyError where memory can't be changed.
    """
    key = key_of(canonical_target_within(path))
    store = FilesDir.below(current_settings().base)
    if not store.kept_path.is_dir():
        return False
    store.give_up(store.kept.files(key))
    turn = store.writing(key)
    free = turn.acquire()
    if free:
        turn.release()
    return not free


@contextmanager
def wait_for_writers(path: str | os.PathLike[str]) -> Iterator[bool]:
    """Waits until nobody writes to ``path`` any more, and keeps others from it. Yields True if a newer save is there.

    Raises BusyError if somebody still writes after an hour.
    """
    key = key_of(canonical_target_within(path))
    store = FilesDir.below(current_settings().base)
    turn = store.writing(key)
    if not turn.acquire(_TURN):
        raise BusyError(f"{path}: is still being written")
    try:
        yield store.kept.find(key) is not None
    finally:
        turn.release()
