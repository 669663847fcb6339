"""Bounds waits for storage: a call into a file system that hangs never returns, not even for a signal."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from rekindle.errors import UsageError

__all__ = ["check_timeout", "in_background", "with_timeout"]

T = TypeVar("T")

_FOR_EVER = 100 * 365 * 86400.0
"""Seconds that stand for no bound: the operating system's waits take no more than some 292 years."""


def check_timeout(seconds: object) -> float:
    """Returns a user's ``timeout`` as seconds that every wait takes. Raises UsageError for what is none.

    ``math.inf`` is one, and means that there is no bound.
    """
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not seconds >= 0:
        raise UsageError(
            f"timeout is {seconds!r}: must be a number of seconds, 0 or more; math.inf waits for as long as it takes"
        )
    return float(min(seconds, _FOR_EVER))


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Does ``work`` in a daemon thread, which doesn't keep the process from ending. Returns its future."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def with_timeout(seconds: float, where: str | os.PathLike[str], work: Callable[[], T]) -> T:
    """Returns the result of ``work``. Raises TimeoutError that names ``where`` when it takes over ``seconds``.

    The thread goes on waiting after that; only the caller is set free. Where no thread can be had, there is no bound.
    """
    try:
        answer = in_background(work, "rekindle-timeout")
    except RuntimeError:  # the interpreter ends, or the limit of processes is reached
        return work()
    if not wait([answer], seconds).done:  # not result(seconds), as work itself may raise TimeoutError
        why = f"does not answer within {seconds:.0f} s: its file system hangs, see that the server is there"
        raise TimeoutError(errno.ETIMEDOUT, why, os.fspath(where))
    return answer.result()
