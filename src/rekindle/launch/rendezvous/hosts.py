"""Knows which hosts are this one, and by which address others reach it."""

from __future__ import annotations

import errno
import socket

from rekindle.launch.rendezvous.wire import Address

__all__ = ["BACKLOG", "is_short_for", "is_this_host", "listen", "own_host"]

BACKLOG = 1024
"""Connections that wait to be taken: the nodes of a large job come at once."""
_FAR = "192.0.2.1"
"""An address that no host has: it is reached, if at all, by the network's own way out."""


def is_this_host(host: str) -> bool:
    """Returns True if a name or number is this machine's: a socket can be bound to it."""
    if any(is_short_for(host, name) for name in (socket.gethostname(), socket.getfqdn())):
        return True  # also where nobody else knows it yet, as a pod of Kubernetes that has just begun
    for family, kind, protocol, _, address in _resolve(host):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind((address[0], 0))
            except OSError:
                continue
            return True
    return False


def is_short_for(host: str, name: str) -> bool:
    """Returns True if a host is called this within its own domain, or within any that its name ends with."""
    return f"{name}.".lower().startswith(f"{host}.".lower())


def own_host(endpoints: tuple[Address, ...], local: list[Address]) -> str:
    """Returns the host by which others reach this launcher. ``local`` are the endpoints that are of this host.

    It is the name that the others have for it, or the number that packets to them come from. Their names may not be
    known yet, as those of containers that start at the same time.
    """
    if local:
        return local[0].host
    for endpoint in (*endpoints, Address(_FAR, 9)):
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
        return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and port:
            return None
        raise


def _resolve(host: str) -> list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int]]]:
    try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)  # type: ignore[return-value]
    except OSError:
        return []
