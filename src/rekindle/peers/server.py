"""Serves the other nodes of a job: answers their requests, each connection in a thread of its own."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from rekindle.common.os_errors import describe_error
from rekindle.errors import RekindleError
from rekindle.peers.wire import Credentials, Link, OtherStartError, WireError, accept, refuse

__all__ = ["Handler", "PeerServer", "listen"]

log = logging.getLogger("rekindle.agent")

Handler = Callable[[Link, dict[str, Any]], dict[str, Any] | None]
"""Answers requests of one verb. Returns the reply, or None if there is none, or if it has sent it itself."""

_MOST = 128
"""Connections at a time. Each has a thread and an open file."""
_WAITING = 128
"""Connections that may wait to be accepted."""
_HANDSHAKE = 5.0
"""Seconds that a client has to prove itself."""
_IDLE = 600.0
"""Seconds without a request after which a connection is closed. One to a host that is gone ends much earlier."""
_BRAKE = 0.01
"""Seconds until the next connection is accepted when one had to go for it: a flood gets no more of a processor."""
_WARN_EVERY = 60.0
"""Seconds between warnings of clients that can't prove themselves."""
_ENDS_WITHIN = 5.0
"""Seconds that threads have to end at the server's end. What they wait for is shut down then."""
_LOOK = 1.0
"""Seconds between looks for the end, where the kernel doesn't interrupt the wait for a connection."""
_LONGEST_ERROR = 1000
"""Characters of an error in a reply."""


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address of this host, IPv4 or IPv6. The port 0 stands for any free one."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address, family=family, backlog=_WAITING)


class _Connection:
    """One accepted connection, and the thread that serves it."""

    def __init__(self, accepted: socket.socket, address: str) -> None:
        self.socket, self.address = accepted, address
        self.proved = False
        self.thread: threading.Thread | None = None

    def end(self) -> None:
        """Has its thread end: whatever it waits for fails at once."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class PeerServer:
    """Answers requests by their field ``verb``, from ``start`` to ``close``.

    ``credentials`` is asked at each connection and each request, in the connection's thread: None as long as the job
    has no mesh. A connection ends once they change, so that no node of an earlier start is heard.
    """

    def __init__(
        self,
        listener: socket.socket,
        credentials: Callable[[], Credentials | None],
        handlers: Mapping[str, Handler],
    ) -> None:
        """``listener`` is closed with the server."""
        self._listener, self._credentials, self._handlers = listener, credentials, dict(handlers)
        self._connections: list[_Connection] = []
        """The oldest first."""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._warned = -_WARN_EVERY
        self._thread = threading.Thread(target=self._accept_all, name="rekindle-peers", daemon=True)

    def start(self) -> None:
        """Begins to accept connections."""
        self._listener.settimeout(_LOOK)
        self._thread.start()

    def close(self) -> None:
        """Closes the listener and all connections, and waits for their threads for a while."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        until = time.monotonic() + _ENDS_WITHIN
        if self._thread.ident is not None:
            self._thread.join(_ENDS_WITHIN)
        self._listener.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.end()
        for connection in connections:
            if connection.thread is not None and connection.thread is not threading.current_thread():
                connection.thread.join(max(0.0, until - time.monotonic()))

    def _accept_all(self) -> None:
        while not self._closed.is_set():
            try:
                accepted, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # no more open files, or the end
                self._closed.wait(0.1)
                continue
            connection = _Connection(accepted, str(address[0]))
            if self._make_room(connection):
                self._start(connection)

    def _make_room(self, connection: _Connection) -> bool:
        """Counts a connection. Beyond the limit the oldest that has not proved itself goes, or else this one."""
        with self._lock:
            self._connections.append(connection)
            if len(self._connections) <= _MOST:
                return True
            oldest = next(each for each in self._connections if not each.proved)
            self._connections.remove(oldest)
        oldest.end()
        if oldest is connection:
            connection.socket.close()
        self._closed.wait(_BRAKE)
        return oldest is not connection

    def _start(self, connection: _Connection) -> None:
        connection.thread = threading.Thread(target=self._serve, args=(connection,), name="rekindle-peer", daemon=True)
        try:
            connection.thread.start()
        except RuntimeError:  # no more threads
            connection.thread = None
            self._forget(connection)

    def _forget(self, connection: _Connection) -> None:
        connection.socket.close()
        with self._lock, suppress(ValueError):  # another connection may have taken its place
            self._connections.remove(connection)

    def _serve(self, connection: _Connection) -> None:
        try:
            credentials = self._credentials()
            if credentials is None:
                refuse(connection.socket, "not in a mesh now", _HANDSHAKE)
                return
            link = accept(connection.socket, credentials, _HANDSHAKE)
            connection.proved = True
            try:
                self._answer_all(link, credentials)
            finally:
                link.close()
        except (OSError, OtherStartError) as error:
            log.debug("a connection from %s ended: %s", connection.address, error)
        except WireError as error:
            self._warn(f"a connection from {connection.address} was closed: {error}")
        finally:
            self._forget(connection)

    def _answer_all(self, link: Link, credentials: Credentials) -> None:
        """Answers requests until the client closes the link, or belongs to the mesh no more."""
        while not self._closed.is_set():
            request = link.receive(_IDLE)
            if self._credentials() != credentials:
                return
            reply = self._answer(link, request)
            link.skip()
            if reply is not None:
                link.send(reply)

    def _answer(self, link: Link, request: dict[str, Any]) -> dict[str, Any] | None:
        verb = request.get("verb")
        handler = self._handlers.get(verb) if isinstance(verb, str) else None
        if handler is None:
            return {"error": f"no such verb: {str(verb)[:100]!r}"}
        try:
            return handler(link, request)
        except (RekindleError, OSError, ValueError) as error:
            return {"error": describe_error(error)[:_LONGEST_ERROR]}
        except Exception as error:
            log.exception("the request %r of node %s failed", verb, link.peer)
            return {"error": f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]}

    def _warn(self, text: str) -> None:
        """Warns of clients that can't prove themselves, now and then: there may be thousands."""
        now = time.monotonic()
        if now - self._warned >= _WARN_EVERY:
            self._warned = now
            log.warning("%s", text)
