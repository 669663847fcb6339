"""Reads and writes the bytes of one TCP connection: no wait is without a bound."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

__all__ = ["TimedSocket"]

STALL = 15.0
"""Seconds without progress after which a transfer of raw bytes is given up: a lost node is called lost earlier."""
_LOOK = 1.0
"""Seconds that the kernel waits, at most, in one call that transfers raw bytes. A stall is noticed so much later."""
_PIECE = 1 << 20
"""Bytes of a message that one call receives at most."""
_MAX_VIEWS = 256
"""Buffers that one call fills. The kernel's limit is 1,024."""
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
"""Options that end a connection 25 s after the other host is gone, though nobody reads or writes. Linux has all."""


class TimedSocket:
    """A connected socket, for one thread at a time. A wait that ends without a result raises TimeoutError.

    Messages wait in ``poll``, each until a time of its own. Raw bytes wait in the kernel's calls for them, which return
    with all that was asked for: fewer calls, and fewer turns at the interpreter.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._arrived = bytearray()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            with suppress(OSError, AttributeError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, _timeval(min(_LOOK, STALL)))

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

    def read_into(self, views: Sequence[memoryview], seconds: float | None = None) -> None:
        """Fills ``views`` straight from the socket. Raises TimeoutError after ``STALL`` or so many without a byte."""
        assert not self._arrived, "peek is asked for no more than is taken"
        todo = list(views)

        def receive(done: int) -> int:
            count = self._socket.recvmsg_into(todo[:_MAX_VIEWS], 0, socket.MSG_WAITALL)[0]
            if not count:
                raise ConnectionResetError("the connection was closed by the other side")
            left = count
            while todo and left >= len(todo[0]):
                left -= len(todo.pop(0))
            if left:
                todo[0] = todo[0][left:]
            return count

        self._transfer(receive, sum(map(len, todo)), "nothing arrived in time", seconds)

    def write(self, data: bytes, seconds: float) -> None:
        """Sends all of ``data``, within ``seconds``."""
        self._socket.settimeout(seconds)
        self._socket.sendall(data)

    def write_view(self, view: memoryview) -> None:
        """Sends all of ``view``. Raises TimeoutError when none of it is taken for ``STALL`` seconds."""
        self._transfer(lambda done: self._socket.send(view[done:]), len(view), "the other side takes no bytes")

    def write_file(self, fd: int, start: int, stop: int) -> None:
        """Sends a range of a file from the kernel's own pages, as ``write_view`` does."""

        def send(done: int) -> int:
            count = os.sendfile(self._socket.fileno(), fd, start + done, stop - start - done)
            if not count:
                raise OSError(f"the file ends {stop - start - done} bytes before the range that is to be sent")
            return count

        self._transfer(send, stop - start, "the other side takes no bytes")

    def close(self) -> None:
        """Closes the connection. May be called again."""
        self._socket.close()

    def _transfer(self, move: Callable[[int], int], total: int, stalled: str, seconds: float | None = None) -> None:
        """Moves ``total`` bytes. ``move`` moves some, is given the number of those before, and returns that of its own.

        Raises TimeoutError, with ``stalled``, when none are moved for so many seconds; None for ``STALL``.
        """
        self._socket.settimeout(None)
        seconds = STALL if seconds is None else seconds
        done, until = 0, time.monotonic() + seconds
        while done < total:
            try:
                done += move(done)
            except BlockingIOError:  # not one byte for as long as the kernel waits
                if time.monotonic() >= until:
                    raise TimeoutError(stalled) from None
            else:
                until = time.monotonic() + seconds


def _timeval(seconds: float) -> bytes:
    """Returns a time as the kernel takes it: whole seconds, and microseconds."""
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))
