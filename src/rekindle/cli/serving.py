"""Serves an application over TCP until the process is told to end, for the commands that do so."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from aiohttp import web

from rekindle.common.os_errors import describe_error
from rekindle.errors import RekindleError

__all__ = ["serve_until_told"]

_ENDS_WITHIN = 1.0
"""Seconds that a request under way gets at the end."""


async def serve_until_told(app: web.Application, host: str, port: int, tell: Callable[[str], object]) -> None:
    """Serves ``app`` until SIGTERM or SIGINT. Raises RekindleError where it can't listen.

    ``tell`` is given the address, as ``http://127.0.0.1:80``, once it answers.
    """
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_ENDS_WITHIN)
    await runner.setup()
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            why = describe_error(error)
            raise RekindleError(f"{host}, port {port}: can't listen there: {why}: choose another by --port") from error
        for address in runner.addresses:
            tell(f"http://{_spelt(address)}")
        await over.wait()
    finally:
        await runner.cleanup()


def _spelt(address: tuple[str, int]) -> str:
    name, port = address[:2]
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
