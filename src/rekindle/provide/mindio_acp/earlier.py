"""Lets a save wait until the checkpoint before it is on storage.

Programs note a checkpoint as the latest as soon as its saves have returned. So that at most one such note is ahead of
storage, the first save of a checkpoint waits for the files of the one before.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence

from rekindle.common.os_errors import explain
from rekindle.errors import NotDurableError, NotFoundError, RekindleError
from rekindle.files import flush, status
from rekindle.files.saving import canonical_target_within
from rekindle.provide.mindio_acp.paths import differs_at, masked

__all__ = ["Earlier"]

log = logging.getLogger("rekindle")

_LONGEST = 300.0
"""Seconds that a save waits for storage to take the checkpoint before."""
_LOOK_EVERY = 1.0
"""Seconds between looks for uploads that fail."""


class _Family:
    """Files of this process whose directories differ in numbers only."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        """Files of the newest checkpoint."""
        self.level: int | None = None
        """Directory, counted from above, whose number is the checkpoint's: the highest one seen to change."""


class Earlier:
    """Remembers this process's saves. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[str, _Family] = {}

    def wait(self, paths: Sequence[str]) -> None:
        """Waits for the files of the checkpoint before, where one of ``paths`` begins another. Logs what isn't stored.

        A directory for each checkpoint is what tells them apart. Files side by side in one are of no checkpoint, and
        never waited for.
        """
        with self._lock:
            before = {path for family in map(self._family, paths) for path in self._take(family, paths)}
        for path in sorted(before):
            _wait(path)

    def note(self, paths: Sequence[str]) -> None:
        """Takes down files that have been saved."""
        with self._lock:
            for path in paths:
                known = self._family(path).paths
                if path not in known:
                    known.append(path)

    def _family(self, path: str) -> _Family:
        return self._families.setdefault(masked(os.path.dirname(path)), _Family())

    def _take(self, family: _Family, paths: Sequence[str]) -> list[str]:
        """Returns a family's files if a path is of another checkpoint, and forgets them."""
        levels = [
            level
            for path in paths
            for known in family.paths[:1]
            if self._family(path) is family and (level := differs_at(path, known)) is not None
        ]
        if not levels or (family.level is not None and min(levels) > family.level):
            return []
        family.level = min(levels)
        before, family.paths = family.paths, []
        return before


def _wait(path: str) -> None:
    until = time.monotonic() + _LONGEST
    while True:
        try:
            flush(path, timeout=max(0.0, min(_LOOK_EVERY, until - time.monotonic())))
            return
        except NotFoundError:  # somebody has removed it
            return
        except (RekindleError, OSError) as error:
            if isinstance(error, NotDurableError) and time.monotonic() < until and not _has_failed(path):
                continue
            log.warning(
                "the next checkpoint is saved while the one before is in memory only, and both would be lost with this "
                "node: %s",
                explain(error),
            )
            return


def _has_failed(path: str) -> bool:
    target = canonical_target_within(path)
    return any(file.path == target and file.problem is not None for file in status())
