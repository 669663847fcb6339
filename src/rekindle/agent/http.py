"""Serves the agent's HTTP requests, and sends them: over a Unix socket in the job's own directory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from rekindle.agent.address import socket_address
from rekindle.errors import AgentError
from rekindle.format.fields import loads

__all__ = ["send_request", "serve"]

_CONNECTIONS = 64
"""Most connections at a time; beyond that the oldest is closed. Each is an open file, which a drain may need."""
_CONNECTION_LASTS = 30.0
"""Seconds that a connection may last. A request takes milliseconds."""
_LONGEST = 1 << 20
"""Most bytes of an answer that are read."""


async def serve(
    listener: socket.socket,
    status: Callable[[], dict[str, Any]],
    stop: Callable[[], None],
    send_to_rank: Callable[[int, dict[str, Any]], bool],
) -> web.AppRunner:
    """Answers ``GET /status``, ``POST /stop`` and ``POST /drill`` until the runner is cleaned up.

    ``listener`` is closed with it.
    ``send_to_rank`` sends a message to a rank, and returns False when it isn't connected.
    """

    async def get_status(_: web.Request) -> web.Response:
        return web.json_response(status())

    async def post_stop(_: web.Request) -> web.Response:
        stop()
        return web.json_response(status())

    async def post_drill(request: web.Request) -> web.Response:
        rank, fault = request.query.get("rank", ""), request.query.get("fault")
        if not (rank.isascii() and rank.isdecimal() and len(rank) < 10) or fault is None:
            raise web.HTTPBadRequest(text="the request must be /drill?rank=NUMBER&fault=NAME")
        return web.json_response({"told": send_to_rank(int(rank), {"drill": fault})})

    listeners: list[asyncio.Server] = []

    async def stop_listening(_: web.Application) -> None:
        for listener in listeners:
            listener.close()

    app = web.Application()
    app.on_shutdown.append(stop_listening)
    app.add_routes(
        [web.get("/status", get_status), web.post("/stop", post_stop), web.post("/drill", post_drill)],
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    loop, server = asyncio.get_running_loop(), runner.server
    assert server is not None

    def accept() -> asyncio.BaseProtocol:
        for oldest in server.connections[:-_CONNECTIONS]:
            _end(oldest)
        handler = server()
        loop.call_later(_CONNECTION_LASTS, _end, handler)  # aiohttp waits for the rest of a request for ever
        return handler

    listeners.append(await loop.create_unix_server(accept, sock=listener))
    return runner


def _end(handler: web.RequestHandler) -> None:
    """Ends a connection now. ``force_close`` alone waits, for ever, until the client has read what was sent to it."""
    transport = handler.transport
    handler.force_close()
    if transport is not None:
        transport.abort()


def send_request(agent: Path, method: str, path: str, timeout: float = 5.0) -> dict[str, Any]:
    """Sends a request to the agent that listens at a path. Returns its answer.

    Raises AgentError without one in ``timeout`` seconds.
    """

    async def exchange(name: str) -> dict[str, Any]:
        limit = aiohttp.ClientTimeout(total=timeout)
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(name), timeout=limit) as session,
            session.request(method, f"http://agent{path}") as response,
        ):
            text = b""
            while len(text) < _LONGEST and (piece := await response.content.read(_LONGEST)):
                text += piece
            answer = loads(text) if response.ok and len(text) < _LONGEST else None
            if not isinstance(answer, dict):
                raise AgentError(f"agent at {agent} does not answer {path}: {response.status} {text[:200]!r}")
            return answer

    try:
        with socket_address(agent) as name:
            return asyncio.run(exchange(name))
    except (OSError, ValueError, aiohttp.ClientError, asyncio.TimeoutError) as error:
        raise AgentError(f"agent at {agent} does not answer: {str(error) or type(error).__name__}") from error
