"""Knows which hosts are this one, and by which address others reach it."""

from __future__ import annotations

import errno
import socket

from rekindle.launch.rendezvous.wire import Address

__all__ = ["is_this_host", "listen", "own_host"]

_BACKLOG = 1024
"""Connections that wait to be taken: the nodes of a large job come at once."""


def is_this_host(host: str) -> bool:
    """Returns True if a name or number is this machine's: a socket can be bound to it."""
    if host in (socket.gethostname(), socket.getfqdn()):
        return True
    for family, kind, protocol, _, address in _resolve(host):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind((address[0], 0))
            except OSError:
                continue
            return True
    return False


def own_host(endpoints: tuple[Address, ...], local: list[Address]) -> str:
    """Returns the host by which others reach this launcher. ``local`` are the endpoints that are of this host.

    It is the name that the others have for it, or the number that packets to them come from.
    """
    if local:
        return local[0].host
    for endpoint in endpoints:
        for family, _, _, _, address in _resolve(endpoint.host):
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                try:
                    probe.connect((address[0], endpoint.port))  # sends nothing
                except OSError:
                    continue
                return str(probe.getsockname()[0])
    return socket.getfqdn()


def listen(port: int) -> socket.socket | None:
    """Returns a socket that listens at a port, 0 for any, of all addresses; None if something else has the port."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and port:
            return None
        raise


def _resolve(host: str) -> list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int]]]:
    try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)  # type: ignore[return-value]
    except OSError:
        return []
