"""Which store a root is."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from rekindle.format.names import Root
from rekindle.storage.posix import PosixStore
from rekindle.storage.store import Store

if TYPE_CHECKING:
    from rekindle.storage.objects import ObjectStore

__all__ = ["open_store", "urls_below"]


def open_store(root: Root) -> Store:
    """The store of a root as ``root_of`` gives it, or of its text. Costs nothing for a path, and nothing is asked of a
    server.

    Raises UsageError when what it takes for a URL is not installed, or not configured.
    """
    text = str(root)
    return _objects(text, os.getpid()) if "://" in text else PosixStore(Path(text))


def urls_below(url: str) -> list[str]:
    """What there is one level below the URL of an object store: one request. Raises OSError, or as ``open_store``."""
    return _objects(url, os.getpid()).below()


@lru_cache(maxsize=16)
def _objects(url: str, _process: int) -> ObjectStore:
    """One of each in a process, for its connections are kept open; a forked one can't use those of its parent."""
    from rekindle.storage.objects import ObjectStore  # noqa: PLC0415  8 MB that an agent of a directory does without

    return ObjectStore(url)
