"""Knows the paths of one checkpoint from those of another: programs name both alike, but for a number."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress

from rekindle.storage.path_place import is_placeholder

__all__ = ["LONGEST", "beside_it", "differs_at", "is_on_storage", "masked"]

LONGEST = 1024
"""Characters of a path at most, for the calls that say so."""
_MOST = 1024
"""Bytes of a placeholder at most: a larger file needs no second look."""


def masked(text: str) -> str:
    """Returns a path with ``#`` for each number in it."""
    return re.sub(r"\d+", "#", text)


def differs_at(path: str, other: str) -> int | None:
    """Returns the number of the first directory in which two paths that are ``masked`` alike differ, if any does."""
    here, there = os.path.dirname(path).split(os.sep), os.path.dirname(other).split(os.sep)
    return next((number for number, parts in enumerate(zip(here, there, strict=True)) if parts[0] != parts[1]), None)


def is_on_storage(path: str) -> bool:
    """True if a regular file is there that is not a placeholder. Raises OSError where storage refuses."""
    try:
        info = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    if not stat.S_ISREG(info.st_mode):
        return False
    if info.st_size > _MOST:
        return True
    with open(path, "rb") as file:
        return not is_placeholder(file.read(_MOST))


def beside_it(path: str) -> list[str]:
    """Lists files on storage that are named as ``path`` but for one number, the newest first: other checkpoints."""
    found: list[tuple[float, str]] = []
    with suppress(OSError):
        for other in _others(os.path.abspath(path)):
            with suppress(OSError):
                if is_on_storage(other):
                    found.append((os.stat(other).st_mtime, other))
    return [other for _, other in sorted(found, reverse=True)]


def _others(path: str) -> Iterator[str]:
    parts = path.split(os.sep)
    for number, part in enumerate(parts):
        above = os.sep.join(parts[:number]) or os.sep
        if masked(part) != part and os.path.isdir(above):
            for name in os.listdir(above):
                if name != part and masked(name) == masked(part):
                    yield os.sep.join([*parts[:number], name, *parts[number + 1 :]])
