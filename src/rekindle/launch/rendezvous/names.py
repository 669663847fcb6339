"""Looks host names up in threads that nobody waits for: an answer that comes late serves the next connection."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from contextlib import suppress
from functools import partial
from typing import Any

__all__ = ["PatientLoop"]


class PatientLoop(asyncio.SelectorEventLoop):
    """An event loop in which a host name is looked up once at a time.

    A server for names that is gone makes each lookup take seconds, longer than a launcher waits for an answer. All of
    asyncio's own threads would be busy with it, and this process would wait for them at its end.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lookups: dict[Any, asyncio.Future[Any]] = {}

    async def getaddrinfo(self, host: Any, port: Any, **options: int) -> Any:
        """Returns what ``socket.getaddrinfo`` does. The lookup goes on when its caller gives up."""
        key = (host, port, *options.values())
        found = self._lookups.get(key)
        if found is None:
            found = self._lookups[key] = self._look_up(host, port, options)
        try:
            return await asyncio.shield(found)
        finally:
            if found.done():
                self._lookups.pop(key, None)

    def _look_up(self, host: Any, port: Any, options: dict[str, int]) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self.create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps nobody asks again

        def look() -> None:
            try:
                tell = partial(future.set_result, socket.getaddrinfo(host, port, **options))
            except (OSError, UnicodeError) as error:
                tell = partial(future.set_exception, error)
            with suppress(RuntimeError):  # the loop has ended
                self.call_soon_threadsafe(tell)

        try:
            threading.Thread(target=look, name="rekindle-lookup", daemon=True).start()
        except RuntimeError as error:  # the limit of processes is reached
            future.set_exception(OSError(errno.EAGAIN, str(error)))
        return future
