"""Decides who may read what a command serves: on loopback this node, elsewhere those that know a token."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from rekindle.errors import UsageError

__all__ = ["check_access", "is_loopback", "read_token"]

_LONGEST, _SHORTEST = 4096, 16
"""Most bytes of a token's file, and fewest characters of a token."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def read_token(path: Path | None) -> str | None:
    """Reads a token from a file, without spaces around it; None without a file. Raises UsageError."""
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            token = file.read(_LONGEST).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: has no token that can be read: {error}") from error
    if len(token) < _SHORTEST or not token.isprintable():
        raise UsageError(f"{path}: a token is a line of at least {_SHORTEST} printable characters")
    return token


def is_loopback(host: str) -> bool:
    """True if only this node can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_access(host: str, token: str | None) -> Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]:
    """Returns a middleware that refuses all that may not read. Raises UsageError for others' reach without a token.

    With a token each request must bring it, as ``Authorization: Bearer TOKEN``. Without one a request must be for a
    name of loopback: a page of another site, open in a browser here, could have its own name lead to this address.
    """
    if token is None and not is_loopback(host):
        raise UsageError(f"{host} can be reached from other machines: give a token by --token-file, or use 127.0.0.1")

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if token is None:
            if not is_loopback(_name(request.host)):
                raise web.HTTPForbidden(text="this address answers to 127.0.0.1 and localhost only\n")
        elif not hmac.compare_digest(request.headers.get("Authorization", "").encode(), f"Bearer {token}".encode()):
            raise web.HTTPUnauthorized(headers={"WWW-Authenticate": "Bearer"}, text="give the token\n")
        return await handler(request)

    return middleware


def _name(host: str) -> str:
    """Returns a request's host without its port and brackets."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
