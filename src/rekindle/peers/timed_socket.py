"""Reads and writes the bytes of one TCP connection: no wait is without a bound."""

from __future__ import annotations

import os
import select
import socket
import time
from contextlib import suppress

__all__ = ["TimedSocket"]

STALL = 15.0
"""Seconds without progress after which a transfer of raw bytes is given up: a lost node is called lost earlier."""
_PIECE = 1 << 20
"""Bytes that one call sends or receives at most."""
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
"""Options that end a connection 25 s after the other host is gone, though nobody reads or writes. Linux has all."""


class TimedSocket:
    """A connected socket, for one thread at a time. A wait that ends without a result raises TimeoutError."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._arrived = bytearray()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            with suppress(OSError, AttributeError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def peek(self, count: int, until: float) -> bytearray:
        """Waits for ``count`` bytes and returns all that have arrived, without taking them.

        After a TimeoutError the bytes that had arrived are still there. Raises ConnectionError at the stream's end.
        """
        while len(self._arrived) < count:
            self._socket.settimeout(max(0.0, until - time.monotonic()))
            try:
                piece = self._socket.recv(min(count - len(self._arrived), _PIECE))
            except BlockingIOError:
                raise TimeoutError("nothing arrived in time") from None
            if not piece:
                raise ConnectionResetError("the connection was closed by the other side")
            self._arrived += piece
        return self._arrived

    def take(self, count: int) -> bytes:
        """Takes ``count`` bytes that ``peek`` has returned."""
        taken = bytes(self._arrived[:count])
        del self._arrived[:count]
        return taken

    def read_into(self, view: memoryview) -> None:
        """Fills ``view`` straight from the socket. Raises TimeoutError when nothing arrives for ``STALL`` seconds."""
        assert not self._arrived, "peek is asked for no more than is taken"
        self._socket.settimeout(STALL)
        done = 0
        while done < len(view):
            count = self._socket.recv_into(view[done : done + _PIECE])
            if not count:
                raise ConnectionResetError("the connection was closed by the other side")
            done += count

    def write(self, data: bytes, seconds: float) -> None:
        """Sends all of ``data``, within ``seconds``."""
        self._socket.settimeout(seconds)
        self._socket.sendall(data)

    def write_view(self, view: memoryview) -> None:
        """Sends all of ``view``. Raises TimeoutError when none of it is taken for ``STALL`` seconds."""
        self._socket.settimeout(STALL)
        done = 0
        while done < len(view):
            done += self._socket.send(view[done : done + _PIECE])

    def write_file(self, fd: int, start: int, stop: int) -> None:
        """Sends a range of a file from the kernel's own pages, as ``write_view`` does."""
        self._socket.settimeout(STALL)  # the descriptor doesn't block then
        ready = select.poll()
        ready.register(self._socket, select.POLLOUT)
        while start < stop:
            try:
                count = os.sendfile(self._socket.fileno(), fd, start, min(stop - start, _PIECE))
            except BlockingIOError:
                if not ready.poll(STALL * 1000):
                    raise TimeoutError("the other side takes no bytes") from None
                continue
            if not count:
                raise OSError(f"the file ends {stop - start} bytes before the range that is to be sent")
            start += count

    def close(self) -> None:
        """Closes the connection. May be called again."""
        self._socket.close()
