"""Holds the settings of files: those of ``configure``, else of the environment, else the defaults."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle.errors import UsageError
from rekindle.memory.job_dir import memory_base
from rekindle.storage.throttle import parse_rate, parse_size

__all__ = ["FileSettings", "configure", "current_settings"]

_PREFIX = "REKINDLE_FILES_"


@dataclass(frozen=True)
class FileSettings:
    """The settings of this process's saves. Raises UsageError for the first invalid one."""

    base: Path
    """Directory of the memory store."""
    limit: int | None = None
    when_full: str = "write"
    drain_limit: int | None = None
    idle_timeout: float = 900.0

    def __post_init__(self) -> None:
        if self.when_full not in ("write", "error"):
            raise UsageError(f"when_full is {self.when_full!r}: must be 'write' or 'error'")
        if not 0 < self.idle_timeout < math.inf:
            raise UsageError(f"idle_timeout is {self.idle_timeout!r}: must be a number of seconds, more than 0")


_given: dict[str, Any] = {}
"""Settings of ``configure``. One set per process, as a process has one place for its files."""


def configure(
    *,
    memory: str | os.PathLike[str] | None = None,
    limit: int | str | None = None,
    when_full: str | None = None,
    drain_limit: int | str | None = None,
    idle_timeout: float | None = None,
) -> None:
    """Sets how this process saves files, from the next one on. None leaves a setting to the environment.

    Args:
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
    )


def _size(value: Any) -> int | None:
    if value is None:
        return None
    number = parse_size(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 1 <= number < 1 << 63:
        raise UsageError(f"limit is {value!r}: must be a number of bytes, or a text such as '40GB' or '1.5GiB'")
    return int(number)
