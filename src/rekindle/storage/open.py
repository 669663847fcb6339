"""Opens the store of a root, and the place of a file: on a file system or in an object store."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from rekindle.format.names import Root
from rekindle.storage.path_place import PathPlace
from rekindle.storage.place import Place
from rekindle.storage.posix import PosixStore
from rekindle.storage.store import Store

if TYPE_CHECKING:
    from rekindle.storage.objects import ObjectStore

__all__ = ["open_place", "open_store", "urls_below"]


def open_store(root: Root) -> Store:
    """Returns the store of a root as ``canonical_root`` gives it, or of its text. Sends no request to a server.

    Raises UsageError when the package that a URL needs is not installed, or not configured.
    """
    text = str(root)
    return _objects(text, os.getpid()) if "://" in text else PosixStore(Path(text))


def open_place(target: str, owner: str = "") -> Place:
    """Returns the place of a file as ``canonical_target`` gives it. Sends no request to a server.

    ``owner`` is the name of the memory store that writes there: two of them never share a temporary file. Raises
    UsageError when the package that a URL needs is not installed, or not configured.
    """
    if "://" not in target:
        return PathPlace(Path(target), owner)
    from rekindle.storage.object_place import ObjectPlace  # noqa: PLC0415  8 MB that the agent of paths saves

    return ObjectPlace(target)


def urls_below(url: str) -> list[str]:
    """Lists the URLs one level below that of an object store: one request. Raises OSError, or as ``open_store``."""
    store = _objects(url, os.getpid())
    from rekindle.storage import objects  # noqa: PLC0415  as in _objects, which fails first without the package

    return objects.urls_below(store)


@lru_cache(maxsize=16)
def _objects(url: str, _process: int) -> ObjectStore:
    """Returns the store of a URL: one per process, as its connections stay open and don't survive a fork."""
    from rekindle.storage.objects import ObjectStore  # noqa: PLC0415  8 MB that the agent of a directory saves

    return ObjectStore(url)
