"""Bounds waits for storage: a call into a file system that hangs never returns, not even for a signal."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

__all__ = ["in_background", "with_timeout"]

T = TypeVar("T")


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

    The thread goes on waiting after that; only the caller is set free.
    """
    answer = in_background(work, "rekindle-timeout")
    if not wait([answer], seconds).done:  # not result(seconds), as work itself may raise TimeoutError
        why = f"does not answer within {seconds:.0f} s: its file system hangs, see that the server is there"
        raise TimeoutError(errno.ETIMEDOUT, why, os.fspath(where))
    return answer.result()
