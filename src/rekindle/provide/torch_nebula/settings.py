"""Holds what ``torch_nebula.init`` was given: where checkpoints persist, how often, and how many stay."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from rekindle.common.environ import env_count
from rekindle.common.timeouts import with_timeout
from rekindle.errors import UsageError
from rekindle.files.settings import current_settings
from rekindle.memory.files_dir import FilesDir
from rekindle.provide.torch_nebula.catalog import Catalog
from rekindle.provide.torch_nebula.ranks import rank_and_world

__all__ = ["NebulaSettings", "canonical_folder", "current_nebula", "init", "memory_root"]

_PREFIX = "NEBULA_PERSISTENT_"
_LOCAL_WORLD = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")
"""Number of ranks on this node, as torchrun and DeepSpeed's launcher tell it."""
_LOOK = 3.0
"""Seconds that storage gets to resolve links in the folder's path. It is taken as it is after that."""


@dataclass(frozen=True)
class NebulaSettings:
    """The settings of this process's checkpoints."""

    root: str
    """Folder of the checkpoints; of names in memory without one."""
    in_memory_only: bool
    interval: float
    """Seconds between two checkpoints that go to storage at once."""
    retention: int
    """Number of checkpoints that stay."""


_current: NebulaSettings | None = None
"""Settings of the last ``init``. One set per process, as the original has."""


def init(
    persistent_storage_path: str | os.PathLike[str] | None = None,
    persistent_time_interval: float | None = None,
    num_of_version_in_retention: int = 2,
) -> None:
    """Sets where this process's checkpoints persist. May be called again.

    Args:
        persistent_storage_path: a folder; ``$NEBULA_PERSISTENT_STORAGE_PATH`` if None. Without either checkpoints stay
            in this node's memory.
        persistent_time_interval: a checkpoint that is begun within so many seconds after one that goes to storage stays
            in memory, until ``flush_persistence``, the end of the process or of its memory.
            ``$NEBULA_PERSISTENT_TIME_INTERVAL`` if None, else 100.
        num_of_version_in_retention: number of checkpoints that stay, in memory and on storage. Older ones are removed.

    Raises:
        UsageError: for a setting that makes no sense.
    """
    global _current
    path = persistent_storage_path or os.environ.get(f"{_PREFIX}STORAGE_PATH")
    interval: Any = persistent_time_interval
    if interval is None:
        interval = os.environ.get(f"{_PREFIX}TIME_INTERVAL") or 100
    try:
        seconds = float(interval)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"persistent_time_interval is {interval!r}: must be a number of seconds, 0 or more")
    keep = num_of_version_in_retention
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise UsageError(f"num_of_version_in_retention is {keep!r}: must be a whole number, 1 or more")
    if path is None and any(name in os.environ and env_count(name) < rank_and_world()[1] for name in _LOCAL_WORLD):
        raise UsageError("persistent_storage_path is not set: memory alone is enough only for ranks on one node")
    if limit := os.environ.get("NEBULA_MEMORY_BUFFER_SIZE"):
        os.environ.setdefault("REKINDLE_FILES_LIMIT", limit)
    root = memory_root() if path is None else canonical_folder(path)
    # The look lets versions go on from those that there are, whatever this host's clock says. A job that is killed
    # again and again never flushes: what it held in memory goes to storage now.
    Catalog(root).let_newest_go()
    _current = NebulaSettings(root, path is None, seconds, keep)


def canonical_folder(path: str | os.PathLike[str]) -> str:
    """Returns the one form of a folder's path. Raises UsageError for a URL."""
    text = os.fspath(path)
    if "://" in text:
        raise UsageError(f"persistent_storage_path {text!r}: must be a folder, not a URL: mount the store")
    whole = os.path.abspath(os.path.expanduser(text))
    try:
        return with_timeout(_LOOK, whole, lambda: os.path.realpath(whole))
    except TimeoutError:
        return whole


def memory_root() -> str:
    """Returns the folder in whose name checkpoints are kept that have no other. It is never made."""
    return str(FilesDir.below(current_settings().base).path / "torch_nebula")


def current_nebula() -> NebulaSettings:
    """Returns the settings that count now: those of the environment where ``init`` was not called."""
    if _current is None:
        init()
    assert _current is not None
    return _current
