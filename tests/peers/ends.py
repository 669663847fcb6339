"""Both ends of a link, with a real server or with somebody in between who reads and changes what passes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import NamedTuple

from rekindle.peers.server import Handler, PeerServer, listen
from rekindle.peers.wire import Credentials, Link, accept, connect

LONG = 60.0
"""Seconds that pass only when something hangs."""
A = Credentials(bytes(range(32)), "a" * 16, "node-a")
B = A._replace(name="node-b")


class Served(NamedTuple):
    """A running server of node B."""

    host: str
    port: int
    server: PeerServer

    def link(self, credentials: Credentials = A) -> Link:
        return connect(self.host, self.port, credentials, LONG)

    def raw(self) -> socket.socket:
        """Connects as somebody who knows no more than the address."""
        return socket.create_connection((self.host, self.port), LONG)


@contextmanager
def serving(
    handlers: Mapping[str, Handler],
    credentials: Callable[[], Credentials | None] = lambda: B,
    host: str = "127.0.0.1",
) -> Iterator[Served]:
    """A server with one more verb, ``echo``."""
    listener = listen(host, 0)
    server = PeerServer(listener, credentials, {"echo": lambda link, message: message, **handlers})
    port: int = listener.getsockname()[1]
    server.start()
    try:
        yield Served(host, port, server)
    finally:
        server.close()


class Between:
    """Somebody between a client, node A, and a server, node B: what one of them sends is passed on by hand."""

    def __init__(self, client: Credentials) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as far:
            self._pool = ThreadPoolExecutor(2)
            self._client = self._pool.submit(connect, *listener.getsockname(), client, LONG)
            self.to_client, _ = listener.accept()
            self.to_server = socket.create_connection(far.getsockname(), LONG)
            self._server = self._pool.submit(accept, far.accept()[0], B, LONG)
        self.to_client.settimeout(LONG)

    def shake_hands(self, change: Callable[[int, bytes], bytes] = lambda number, frame: frame) -> list[bytes]:
        """Passes on the three messages of the handshake, each as ``change`` returns it. Returns them."""
        passed = []
        ways = [(self.to_client, self.to_server), (self.to_server, self.to_client), (self.to_client, self.to_server)]
        with suppress(ConnectionError):  # one end may have had enough
            for number, (start, goal) in enumerate(ways):
                passed.append(change(number, frame_from(start, mac=0)))
                goal.sendall(passed[-1])
        return passed

    def client(self) -> Link:
        return self._client.result(LONG)

    def server(self) -> Link:
        return self._server.result(LONG)

    def close(self) -> None:
        self.to_client.close()
        self.to_server.close()
        for end in (self._client, self._server):
            with suppress(Exception):
                end.result(LONG).close()
        self._pool.shutdown()


@contextmanager
def between(client: Credentials = A) -> Iterator[Between]:
    there = Between(client)
    try:
        yield there
    finally:
        there.close()


def frame_from(source: socket.socket, mac: int = 16) -> bytes:
    """Reads one message as it passes: its length, its text and its MAC, of which those of a handshake have none."""
    start = exactly(source, 4)
    return start + exactly(source, int.from_bytes(start, "big") + mac)


def exactly(source: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = source.recv(count - len(data))
        if not piece:
            raise ConnectionResetError("closed")
        data += piece
    return data


def is_closed(client: socket.socket) -> bool:
    """Waits for the other side to close; whatever it sends before that doesn't count."""
    client.settimeout(LONG)
    with suppress(ConnectionError):
        while client.recv(1 << 16):
            pass
    return True
