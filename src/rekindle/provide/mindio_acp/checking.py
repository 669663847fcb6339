"""Watches directories until the files of a checkpoint are all on storage: ``register_checker``."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rekindle.common.os_errors import explain
from rekindle.errors import RekindleError
from rekindle.files import status
from rekindle.provide.mindio_acp.paths import is_on_storage

__all__ = ["LONGEST_WATCH", "register_checker", "wait_for_checkers"]

log = logging.getLogger("rekindle")

LONGEST_WATCH = 3600
"""Seconds that a watch may last."""
_LOOK_EVERY = 0.5
"""Seconds between looks. Each asks storage about each file."""
_WARN_EVERY = 30.0
"""Seconds between words about storage that can't be read."""
_TEMPORARY = ".rekindle-"
"""First letters of a file that is being written."""
_running: list[threading.Thread] = []
"""Watches of this process that have not ended, for its end to wait for."""


def register_checker(
    callback: Callable[[int, Any], object], check_dict: Mapping[str, int], user_context: Any, timeout_sec: int
) -> int | None:
    """Calls ``callback(result, user_context)`` once, in a thread, when directories hold so many files on storage.

    Files count in all directories below. One that is still in this node's memory only, or a placeholder of one that is
    in another's, doesn't. Any number of watches may run at a time.

    Args:
        callback: gets 0; ``-errno.EFBIG`` if there are more files; ``-errno.ETIMEDOUT`` after ``timeout_sec`` seconds.
        check_dict: number of files of each directory.
        user_context: is passed on.
        timeout_sec: 1 to 3600.

    Returns:
        1, or None, with the reason in the log, where an argument makes no sense or a directory is missing.
    """
    why = _objection(callback, check_dict, timeout_sec)
    if why is not None:
        log.error("mindio_acp.register_checker: nothing is watched: %s", why)
        return None
    wanted = {os.path.realpath(directory): count for directory, count in check_dict.items()}
    until = time.monotonic() + timeout_sec
    thread = threading.Thread(
        target=_watch, args=(callback, wanted, user_context, until), name="mindio-checker", daemon=True
    )
    _running[:] = [other for other in _running if other.is_alive()]
    thread.start()
    _running.append(thread)
    return 1


def _objection(callback: object, check_dict: object, timeout_sec: object) -> str | None:
    if type(timeout_sec) is not int or not 1 <= timeout_sec <= LONGEST_WATCH:
        return f"timeout_sec is {timeout_sec!r}: must be an integer from 1 to {LONGEST_WATCH}"
    if not callable(callback):
        return f"callback is {callback!r}: must be a function"
    if not isinstance(check_dict, Mapping) or not check_dict:
        return f"check_dict is {check_dict!r}: must map directories to numbers of files"
    for directory, count in check_dict.items():
        if type(count) is not int or count < 1:
            return f"{directory} should hold {count!r} files: must be an integer, 1 or more"
        if not isinstance(directory, str) or not os.path.isdir(directory):
            return f"{directory!r} is no directory"
    return None


def _watch(callback: Callable[[int, Any], object], wanted: dict[str, int], context: Any, until: float) -> None:
    result, warned = None, -_WARN_EVERY
    while result is None:
        try:
            result = _result(wanted)
        except (RekindleError, OSError) as error:
            if time.monotonic() - warned > _WARN_EVERY:
                warned = time.monotonic()
                log.warning("files of a checkpoint can't be counted: %s", explain(error))
        if result is None:
            if time.monotonic() >= until:
                result = -errno.ETIMEDOUT
            else:
                time.sleep(_LOOK_EVERY)
    try:
        callback(result, context)
    except Exception:
        log.exception("a callback of mindio_acp.register_checker has failed")


def _result(wanted: dict[str, int]) -> int | None:
    """Returns the result of a watch; None while it has none."""
    on_the_way = {file.path for file in status() if file.state == "memory"}
    counts = {directory: _count(directory, on_the_way) for directory in wanted}
    if any(counts[directory] > wanted[directory] for directory in wanted):
        return -errno.EFBIG
    return 0 if counts == wanted else None


def _count(directory: str, on_the_way: set[str]) -> int:
    """Returns the number of files below a directory that storage has in their newest form."""
    count = 0
    for above, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(above, name)
            count += not name.startswith(_TEMPORARY) and path not in on_the_way and is_on_storage(path)
    return count


def wait_for_checkers(until: float) -> bool:
    """Waits for the watches to end, until a time of ``time.monotonic``. True if all have.

    A watch's own callback, which may call ``flush``, waits for none.
    """
    if threading.current_thread() in _running:
        return True
    for thread in list(_running):
        thread.join(max(0.0, until - time.monotonic()))
    return not any(thread.is_alive() for thread in _running)
