"""Waits until all files are on storage: ``flush``, also when the process ends."""

from __future__ import annotations

import atexit
import logging
import time

from rekindle import files
from rekindle.common.os_errors import explain
from rekindle.errors import RekindleError
from rekindle.provide.mindio_acp.background import background
from rekindle.provide.mindio_acp.checking import wait_for_checkers

__all__ = ["flush"]

log = logging.getLogger("rekindle")

_LONGEST = 300.0
"""Seconds that a flush takes at most."""


def flush() -> int:
    """Waits until all files of this node are on storage, whoever saved them, and watches have ended.

    Returns:
        0 only if that is so, and no save of ``CheckpointHelper`` has failed since the last call. 1 otherwise, with the
        reason in the log, at the latest after 300 seconds.
    """
    until = time.monotonic() + _LONGEST
    failed = background.finish(until)
    try:
        files.flush(timeout=max(0.0, until - time.monotonic()))
    except (RekindleError, OSError) as error:
        log.error("mindio_acp.flush: %s", explain(error))
        failed = True
    if not wait_for_checkers(until):
        log.error("mindio_acp.flush: a watch of register_checker goes on after %.0f s", _LONGEST)
        failed = True
    return int(failed)


def _at_exit() -> None:
    """Lets work in threads end: the last checkpoint's tracker is written by one. The agent needs nobody."""
    until = time.monotonic() + _LONGEST
    background.finish(until)
    wait_for_checkers(until)


atexit.register(_at_exit)
