"""Keeps the newest answer to a slow question, so that many who ask cost no more than one."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic, TypeVar

from rekindle.common.os_errors import explain
from rekindle.common.timeouts import in_background
from rekindle.errors import RekindleError

__all__ = ["Question"]

log = logging.getLogger("rekindle.ui")

T = TypeVar("T")

_SHARE = 5
"""Times as long as an answer took until the question is asked again: the page takes a sixth of a core at most."""


class Question(Generic[T]):
    """A question that is asked in a thread, by one at a time, and only when somebody wants the answer."""

    def __init__(self, ask: Callable[[], T], rest: float) -> None:
        """``ask`` must end by itself. An answer that is younger than ``rest`` seconds is not asked for again."""
        self._ask, self._rest = ask, rest
        self._answer: T | None = None
        self._error: str | None = None
        self._next = self._answered = -math.inf
        self._asking: asyncio.Task[None] | None = None

    async def answer(self, patience: float) -> tuple[T | None, str | None]:
        """Returns the newest answer, waiting ``patience`` seconds for it if it is due, and the last error.

        None while there is no answer yet.
        """
        if self._asking is None and time.monotonic() >= self._next:
            self._asking = asyncio.get_running_loop().create_task(self._refresh())
        if self._asking is not None:
            await asyncio.wait({self._asking}, timeout=patience)
        return self._answer, self._error

    def latest(self) -> tuple[T | None, float]:
        """Returns the newest answer, if there is one, and the seconds since it was last asked for."""
        return self._answer, time.monotonic() - self._answered

    async def _refresh(self) -> None:
        began = time.monotonic()
        try:
            answer = in_background(self._ask, "rekindle-ui-look")
            await _done(answer)
            self._answer, self._error = answer.result(), None
        except (RekindleError, OSError) as error:
            self._error = explain(error) if isinstance(error, OSError) else str(error)
        except Exception as error:  # a defect: the page must not go on showing the answer before as if it were new
            log.exception("a question of the page failed")
            self._error = f"{type(error).__name__}: {error}"
        finally:
            self._answered = now = time.monotonic()
            self._next, self._asking = now + max(self._rest, _SHARE * (now - began)), None


async def _done(answer: Future[T]) -> None:
    """Waits for an answer. A loop that ends first leaves the thread alone: it may still wait for storage."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def wake(_: Future[T]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(over.set)

    answer.add_done_callback(wake)
    await over.wait()
