"""No wait without a bound: a file system that hangs answers nobody, not even signals."""

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
    """Do ``work`` in a thread that keeps no process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def with_timeout(seconds: float, where: str | os.PathLike[str], work: Callable[[], T]) -> T:
    """What ``work`` gives. Raises TimeoutError that names ``where`` when it takes more than ``seconds``."""
    answer = in_background(work, "rekindle-patience")
    if not wait([answer], seconds).done:  # and not by result(), as work may itself end with a TimeoutError
        why = f"does not answer within {seconds:.0f} s: its file system hangs, see that the server is there"
        raise TimeoutError(errno.ETIMEDOUT, why, os.fspath(where))
    return answer.result()
