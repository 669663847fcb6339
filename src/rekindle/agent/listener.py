"""Listens for requests to the agent, and loads what answers them once the first one comes.

Loading takes more than half the processor time of an agent's start, beside training's first steps, and 15 MB of its
memory. Few agents are ever asked.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rekindle.agent.address import socket_address

__all__ = ["answer_requests", "listen"]

log = logging.getLogger("rekindle.agent")

_WAITING = 100
"""Connections that may wait to be accepted."""
_AGAIN = 1.0
"""Seconds until a server that couldn't be had is tried again."""


def listen(path: Path) -> socket.socket:
    """Returns a socket that listens at ``path``, in place of what is there."""
    listener = socket.socket(socket.AF_UNIX)
    listener.setblocking(False)
    path.unlink(missing_ok=True)
    with socket_address(path) as name:
        listener.bind(name)
    listener.listen(_WAITING)
    return listener


async def answer_requests(
    listener: socket.socket,
    status: Callable[[], dict[str, Any]],
    stop: Callable[[], None],
    send_to_rank: Callable[[int, dict[str, Any]], bool],
) -> None:
    """Answers as ``rekindle.agent.http.serve`` does, until it is cancelled. Closes the socket then."""
    with listener:
        await _first_connection(listener)
        while (runner := await _serve(listener, status, stop, send_to_rank)) is None:
            await asyncio.sleep(_AGAIN)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await runner.cleanup()


async def _first_connection(listener: socket.socket) -> None:
    loop, came = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(listener, came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(listener)


async def _serve(listener: socket.socket, *answers: Callable[..., Any]) -> Any:
    """Loads the server and starts it. Returns None if it can't."""
    try:  # in a thread: faults are noticed meanwhile
        http = await asyncio.to_thread(importlib.import_module, "rekindle.agent.http")
        return await http.serve(listener, *answers)
    except Exception as error:  # no memory, no open files: there may be some later
        log.warning("the agent can't answer requests now; drains go on: %s: %s", type(error).__name__, error)
        importlib.invalidate_caches()  # they hold that a folder that couldn't be read is empty
        return None
