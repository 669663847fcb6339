"""Holds the settings of files: those of ``configure``, else of the environment, else the defaults."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle.errors import UsageError
from rekindle.format.names import canonical_root
from rekindle.memory.job_dir import memory_base
from rekindle.storage.throttle import parse_rate, parse_size

__all__ = ["FileSettings", "RootSettings", "configure", "current_settings"]

_PREFIX = "REKINDLE_FILES_"


@dataclass(frozen=True)
class RootSettings:
    """The settings of the files below one directory or URL. None leaves a setting to those of the node."""

    root: str
    limit: int | None = None
    when_full: str | None = None

    def __post_init__(self) -> None:
        _check_when_full(self.when_full or "write")

    def holds(self, target: str) -> bool:
        """True if a file lies below the root."""
        return target.startswith(self.root.rstrip("/") + "/")


@dataclass(frozen=True)
class FileSettings:
    """The settings of this process's saves. Raises UsageError for the first invalid one."""

    base: Path
    """Directory of the memory store."""
    limit: int | None = None
    when_full: str = "write"
    drain_limit: int | None = None
    idle_timeout: float = 900.0
    roots: tuple[RootSettings, ...] = ()

    def __post_init__(self) -> None:
        _check_when_full(self.when_full)
        if not 0 < self.idle_timeout < math.inf:
            raise UsageError(f"idle_timeout is {self.idle_timeout!r}: must be a number of seconds, more than 0")

    def raises_when_full(self, target: str) -> bool:
        """True if a save of ``target`` raises where memory is full, by the nearest root above it that says so."""
        above = [root for root in self.roots if root.when_full is not None and root.holds(target)]
        nearest = max(above, key=lambda root: len(root.root), default=None)
        return (self.when_full if nearest is None else nearest.when_full) == "error"


def _check_when_full(value: str) -> None:
    if value not in ("write", "error"):
        raise UsageError(f"when_full is {value!r}: must be 'write' or 'error'")


_given: dict[str, Any] = {}
"""Settings of ``configure``. One set per process, as a process has one place for its files."""
_roots: dict[str, RootSettings] = {}
"""Settings of ``configure`` for single roots."""


def configure(
    root: str | os.PathLike[str] | None = None,
    *,
    memory: str | os.PathLike[str] | None = None,
    limit: int | str | None = None,
    when_full: str | None = None,
    drain_limit: int | str | None = None,
    idle_timeout: float | None = None,
) -> None:
    """Sets how this process saves files, from the next one on. None leaves a setting to the environment.

    Args:
        root: a directory or URL. Then ``limit`` and ``when_full`` are those of files below it, and no other setting can
            be given; with neither, the root has none of its own any more. Limits of roots within each other, and that
            of the node, all count.
        memory: directory of the memory store. ``$REKINDLE_MEMORY``, else /dev/shm.
        limit: most bytes of files in this node's memory, as a number or such as "40GB". ``$REKINDLE_FILES_LIMIT``, else
            half of the memory store's file system.
        when_full: "write" lets ``save`` write straight to its path when memory is full, "error" lets it raise
            ``MemoryStoreError``. ``$REKINDLE_FILES_WHEN_FULL``, else "write".
        drain_limit: most bytes per second that go to storage, such as "500MB/s". ``$REKINDLE_FILES_DRAIN_LIMIT``, else
            no limit.
        idle_timeout: seconds without a process that saves, after which memory is given back once all is on storage.
            ``$REKINDLE_FILES_IDLE_TIMEOUT``, else 900.

    Raises:
        UsageError: for a setting that makes no sense. Nothing is changed then.
    """
    if root is not None:
        if (memory, drain_limit, idle_timeout) != (None, None, None):
            raise UsageError(f"configure({os.fspath(root)!r}): a root has limit and when_full; the rest is the node's")
        settings = RootSettings(str(canonical_root(root)), _size(limit), when_full)
        _roots.pop(settings.root, None)
        if (limit, when_full) != (None, None):
            _roots[settings.root] = settings
        return
    given = {
        "memory": None if memory is None else os.fspath(memory),
        "limit": limit,
        "when_full": when_full,
        "drain_limit": drain_limit,
        "idle_timeout": idle_timeout,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    _settings(chosen)
    _given.clear()
    _given.update(chosen)


def current_settings() -> FileSettings:
    """Returns the settings that count now. Raises UsageError where the environment has an invalid one."""
    return _settings(_given)


def _settings(given: dict[str, Any]) -> FileSettings:
    def value(name: str) -> Any:
        return given.get(name, os.environ.get(_PREFIX + name.upper()) or None)

    idle = value("idle_timeout")
    try:
        seconds = FileSettings.idle_timeout if idle is None else float(idle)
    except (TypeError, ValueError):
        raise UsageError(f"idle_timeout is {idle!r}: must be a number of seconds") from None
    return FileSettings(
        base=memory_base(given.get("memory")),
        limit=_size(value("limit")),
        when_full=value("when_full") or FileSettings.when_full,
        drain_limit=parse_rate(value("drain_limit")),
        idle_timeout=seconds,
        roots=tuple(_roots.values()),
    )


def _size(value: Any) -> int | None:
    if value is None:
        return None
    number = parse_size(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 1 <= number < 1 << 63:
        raise UsageError(f"limit is {value!r}: must be a number of bytes, or a text such as '40GB' or '1.5GiB'")
    return int(number)
