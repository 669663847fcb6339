"""The agent's questions and answers: HTTP over a Unix socket in the job's own directory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from rekindle.errors import AgentError

__all__ = ["ask", "serve"]


async def serve(
    socket: Path,
    status: Callable[[], dict[str, Any]],
    stop: Callable[[], None],
    tell: Callable[[int, dict[str, Any]], bool],
) -> web.AppRunner:
    """Answer ``GET /status``, ``POST /stop`` and ``POST /drill`` until the runner is cleaned up.

    ``tell`` passes a message to a rank.
    """

    async def get_status(_: web.Request) -> web.Response:
        return web.json_response(status())

    async def post_stop(_: web.Request) -> web.Response:
        stop()
        return web.json_response(status())

    async def post_drill(request: web.Request) -> web.Response:
        told = tell(int(request.query["rank"]), {"drill": request.query["fault"]})
        return web.json_response({"told": told})

    app = web.Application()
    app.add_routes(
        [web.get("/status", get_status), web.post("/stop", post_stop), web.post("/drill", post_drill)],
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    socket.unlink(missing_ok=True)
    await web.UnixSite(runner, str(socket)).start()
    return runner


def ask(socket: Path, method: str, path: str, timeout: float = 5.0) -> dict[str, Any]:
    """One question to an agent. Raises AgentError when it doesn't answer within ``timeout`` seconds."""

    async def exchange() -> dict[str, Any]:
        limit = aiohttp.ClientTimeout(total=timeout)
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket)), timeout=limit) as session,
            session.request(method, f"http://agent{path}") as response,
        ):
            answer: dict[str, Any] = await response.json()
            return answer

    try:
        return asyncio.run(exchange())
    except (OSError, aiohttp.ClientError, asyncio.TimeoutError) as error:
        raise AgentError(f"agent at {socket} does not answer: {error or type(error).__name__}") from error
