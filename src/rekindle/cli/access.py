"""Decides where a command serves, and who may read that: on loopback this node, elsewhere those that know a token."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from aiohttp import web

from rekindle.errors import UsageError

__all__ = ["access_options", "check_access", "is_loopback", "read_token"]

_LONGEST, _SHORTEST = 4096, 16
"""Most bytes of a token's file, and fewest characters of a token."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
F = TypeVar("F", bound=Callable[..., Any])


def access_options(port: int) -> Callable[[F], F]:
    """Gives a command the options of where to serve, by default at ``port`` of loopback, and of the token."""
    options = (
        click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
        click.option(
            "--port", default=port, show_default=True, type=click.IntRange(0, 65535), help="Port; 0 for a free one."
        ),
        click.option(
            "--token-file",
            type=click.Path(path_type=Path, dir_okay=False),
            help="File with the token that readers must give. Needed for an address that other machines reach.",
        ),
    )

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


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
            # Not request.host: without the header that asks the name service, which may take seconds.
            if not is_loopback(_name(request.headers.get("Host", ""))):
                raise web.HTTPForbidden(text="this address answers to 127.0.0.1 and localhost only\n")
        elif not hmac.compare_digest(_bytes(request.headers.get("Authorization", "")), _bytes(f"Bearer {token}")):
            raise web.HTTPUnauthorized(headers={"WWW-Authenticate": "Bearer"}, text="give the token\n")
        return await handler(request)

    return middleware


def _bytes(header: str) -> bytes:
    """Returns the bytes of a header, which may be no text at all."""
    return header.encode(errors="surrogateescape")


def _name(host: str) -> str:
    """Returns a request's host without its port and brackets."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
