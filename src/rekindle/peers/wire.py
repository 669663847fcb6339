"""Exchanges messages and raw bytes between the nodes of a job: authenticated, bounded, each wait with a deadline.

Both ends prove that they know the job's secret. Each message then has a MAC under keys of this connection only, so that
one that was forged, changed, repeated, left out or sent back is refused. Raw bytes have none: the checksums of receipts
find damage in them, not forgery (``docs/security.md``).

::

    client  {"rekindle": 1, "name", "start", "nonce"}
    server  {"name", "nonce", "proof"}                    or {"refused": why}
    client  {"proof"}
    both    messages; one with the field "bytes" is followed by so many raw bytes
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

from rekindle.errors import RekindleError
from rekindle.format.fields import check_integer, loads
from rekindle.memory.nodes import Nodes
from rekindle.peers.timed_socket import TimedSocket

__all__ = ["MAX_MESSAGE", "Credentials", "Link", "OtherStartError", "WireError", "accept", "call", "connect", "refuse"]

MAX_MESSAGE = 1 << 20
"""Bytes of a message, at most."""
_MAX_HELLO = 4096
"""Bytes of a message of the handshake, at most: its sender has proved nothing yet."""
_MAX_TEXT = 255
"""Characters of a node's name, at most, as of a host's. Other texts of a handshake are no longer."""
_MAX_SKIPPED = 16 << 20
"""Raw bytes that are read, at most, only to find the message after them."""
_VERSION = 1
_NONCE = 32
_LENGTH = 4
_MAC = 16
"""Bytes of a message's MAC. A connection has keys of its own, and ends at the first MAC that is wrong."""
_SEND_SECONDS = 10.0
"""Bound on the time to send a message. The kernel takes it at once, unless the other end hasn't read for long."""


class WireError(RekindleError):
    """The other end is not of this start of the job, sends nonsense, or has answered with an error."""


class OtherStartError(WireError):
    """A client belongs to another start of the job, as happens while the nodes change over, or to another job."""


class Credentials(NamedTuple):
    """Knowledge that makes a process part of a start of a job."""

    secret: bytes
    start: str
    """Id of the incarnation."""
    name: str
    """Name of the own node."""

    @staticmethod
    def of(nodes: Nodes) -> Credentials:
        """Returns those of this node in a start."""
        return Credentials(nodes.secret, nodes.start, nodes.here.name)


class Link:
    """An authenticated connection, for one thread at a time.

    After any error it is closed, except after a TimeoutError of ``receive``.
    """

    def __init__(self, stream: TimedSocket, peer: str, sending: bytes, receiving: bytes) -> None:
        self.peer = peer
        """Name that the other end gave, bound into its proof."""
        self.attached = ExitStack()
        """State that a handler keeps for this connection: closed with it."""
        self._stream = stream
        self._sending, self._receiving = sending, receiving
        self._sent = self._received = 0
        self._unsent = self._unread = 0
        """Raw bytes that a message has announced and that are still to come."""

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message. If it has the field ``bytes``, so many raw bytes must follow.

        Raises WireError while those of the message before are due: this one would be taken for them.
        """
        body, raw = json.dumps(message, separators=(",", ":")).encode(), _size(message)
        with self._closing():
            if len(body) > MAX_MESSAGE or self._unsent:
                raise WireError(f"a message of {len(body)} bytes can't be sent while {self._unsent} raw bytes are due")
            framed = _frame(body)
            self._stream.write(framed + _mac(self._sending, self._sent, framed), _SEND_SECONDS)
            self._sent += 1
            self._unsent = raw

    def receive(self, timeout: float) -> dict[str, Any]:
        """Returns the next message, whole within ``timeout`` seconds. After a TimeoutError it can be asked for again.

        Raises ConnectionError when the other end has closed the link, and WireError for all but a message of it.
        """
        until = time.monotonic() + timeout
        with self._closing(keeps=TimeoutError):
            if self._unread:
                raise WireError(f"{self._unread} raw bytes before the next message are not read")
            length = _frame_length(self._stream.peek(_LENGTH, until), MAX_MESSAGE)
            self._stream.peek(length + _MAC, until)
            framed, mac = self._stream.take(length), self._stream.take(_MAC)
            if not hmac.compare_digest(mac, _mac(self._receiving, self._received, framed)):
                raise WireError("a message has a wrong MAC: it was changed, repeated or forged on the way")
            self._received += 1
            message = _parse(framed)
            self._unread = _size(message)
            return message

    def send_bytes(self, data: memoryview | bytes) -> None:
        """Sends raw bytes that the message before has announced, all of them or a part."""
        view = memoryview(data)
        with self._sending_raw(view.nbytes):
            if view.nbytes:
                self._stream.write_view(view.cast("B"))

    def send_file(self, fd: int, start: int, stop: int) -> None:
        """Sends a range of a file as raw bytes, which don't pass through this process's memory."""
        with self._sending_raw(stop - start):
            self._stream.write_file(fd, start, stop)

    def receive_into(self, *views: memoryview, seconds: float | None = None) -> None:
        """Fills ``views``, one after the other, with the next raw bytes that the last message has announced.

        Raises TimeoutError when none arrive for so many ``seconds``; None for the bound that all transfers have.
        """
        total = sum(view.nbytes for view in views)
        with self._closing():
            if total > self._unread:
                raise WireError(f"{total} raw bytes are asked for, and {self._unread} announced")
            self._stream.read_into([view.cast("B") for view in views if view.nbytes], seconds)
            self._unread -= total

    def skip(self) -> None:
        """Reads and drops the raw bytes that were announced and not read, so that the next message can be received."""
        with self._closing():
            if self._unread > _MAX_SKIPPED:
                raise WireError(f"{self._unread} raw bytes are too many to skip")
            while self._unread:
                self.receive_into(memoryview(bytearray(min(self._unread, 1 << 16))))

    def close(self) -> None:
        """Closes the connection and all that is attached to it. May be called again."""
        try:
            self.attached.close()
        finally:
            self._stream.close()

    @contextmanager
    def _sending_raw(self, count: int) -> Iterator[None]:
        with self._closing():
            if not 0 <= count <= self._unsent:
                raise WireError(f"{count} raw bytes are to be sent, and {self._unsent} were announced")
            yield
            self._unsent -= count

    @contextmanager
    def _closing(self, keeps: type[OSError] | tuple[()] = ()) -> Iterator[None]:
        """Closes the link at any error but ``keeps``: nobody could tell what the next byte belongs to."""
        try:
            yield
        except keeps:
            raise
        except BaseException:
            self.close()
            raise


def call(link: Link, message: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """Sends a request and returns the reply. Raises WireError for a reply that is an error.

    After a TimeoutError the reply may still come, so that the link is no longer of use: it is closed.
    """
    link.send(message)
    try:
        reply = link.receive(timeout)
    except TimeoutError:
        link.close()
        raise
    if "error" in reply:
        raise WireError(f"node {link.peer}: {str(reply['error'])[:1000]}")
    return reply


def connect(host: str, port: int, credentials: Credentials, timeout: float, peer: str | None = None) -> Link:
    """Returns a link to the server at an address, within ``timeout`` seconds. ``host`` is a name or an IP address.

    ``peer`` is the name of the node that must answer: another one of the start may have its address now. None takes
    any of them. Raises ConnectionRefusedError, TimeoutError or another OSError without a connection, and WireError when
    the server is not that one, or not one of this start of the job.
    """
    until = time.monotonic() + timeout
    connection = socket.create_connection((host, port), timeout)
    with _closed_at_an_error(connection):
        return _greet(TimedSocket(connection), credentials, until, peer)


def accept(connection: socket.socket, credentials: Credentials, timeout: float) -> Link:
    """Returns the link of a connection that a server has accepted, or closes it and raises as ``connect`` does."""
    with _closed_at_an_error(connection):
        return _welcome(TimedSocket(connection), credentials, time.monotonic() + timeout)


def refuse(connection: socket.socket, why: str, timeout: float) -> None:
    """Tells a client that it can't have a link now, and closes the connection. Never fails."""
    with connection, suppress(OSError, WireError):
        stream, until = TimedSocket(connection), time.monotonic() + timeout
        _hear(stream, until)  # closed with bytes unread, the connection would be reset, and the answer lost
        _say(stream, {"refused": why}, until)


def _greet(stream: TimedSocket, own: Credentials, until: float, expected: str | None) -> Link:
    nonce = secrets.token_hex(_NONCE)
    _say(stream, {"rekindle": _VERSION, "name": own.name, "start": own.start, "nonce": nonce}, until)
    answer = _hear(stream, until)
    if "refused" in answer:
        raise WireError(f"refused: {_text(answer, 'refused')!r}")
    peer = _text(answer, "name")
    keys = _Keys(own, [own.name, peer, nonce, _text(answer, "nonce")])
    keys.check(b"server", _text(answer, "proof"))
    _check_other(own, peer)
    if expected not in (None, peer):
        raise WireError(f"node {peer} answers in place of {expected}")
    _say(stream, {"proof": keys.proof(b"client")}, until)
    return Link(stream, peer, keys.derive(b"to server"), keys.derive(b"to client"))


def _welcome(stream: TimedSocket, own: Credentials, until: float) -> Link:
    hello = _hear(stream, until)
    if hello.get("rekindle") != _VERSION:
        _say(stream, {"refused": "another version"}, until)
        raise WireError("the other end speaks no version of the protocol that is known here")
    if _text(hello, "start") != own.start:
        _say(stream, {"refused": "another start of the job"}, until)
        raise OtherStartError("the other end belongs to another start of the job, or to another job")
    peer, nonce = _text(hello, "name"), secrets.token_hex(_NONCE)
    keys = _Keys(own, [peer, own.name, _text(hello, "nonce"), nonce])
    _say(stream, {"name": own.name, "nonce": nonce, "proof": keys.proof(b"server")}, until)
    keys.check(b"client", _text(_hear(stream, until), "proof"))
    _check_other(own, peer)
    return Link(stream, peer, keys.derive(b"to client"), keys.derive(b"to server"))


class _Keys:
    """Derives a connection's proofs and keys from the secret and from all that was said before.

    Both ends have a share in it, so that nothing recorded on another connection fits.
    """

    def __init__(self, own: Credentials, said: list[str]) -> None:
        self._secret = own.secret
        self._transcript = hashlib.sha256(json.dumps([_VERSION, own.start, *said]).encode()).digest()

    def derive(self, use: bytes) -> bytes:
        return hmac.digest(self._secret, b"rekindle peers, " + use + b"\0" + self._transcript, "sha256")

    def proof(self, role: bytes) -> str:
        return self.derive(b"proof of the " + role).hex()

    def check(self, role: bytes, proof: str) -> None:
        """Raises WireError for a proof that was not made with this secret, for this connection, in this role."""
        if not hmac.compare_digest(proof.encode(), self.proof(role).encode()):
            raise WireError("the other end has not proved to know this job's secret")


def _check_other(own: Credentials, peer: str) -> None:
    """Refuses a link of a node with itself, as somebody in between could make one."""
    if peer == own.name:
        raise WireError(f"the other end is this node, {peer}, itself")


def _mac(key: bytes, number: int, framed: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + framed, "sha256")[:_MAC]


def _frame(body: bytes) -> bytes:
    return len(body).to_bytes(_LENGTH, "big") + body


def _frame_length(start: bytes | bytearray, most: int) -> int:
    """Returns the bytes of a frame, with its length before it and without a MAC."""
    size = int.from_bytes(start[:_LENGTH], "big")
    if size > most:
        raise WireError(
            f"a message of {size} bytes was announced, the most are {most}: the other end is no peer of ours"
        )
    return _LENGTH + size


def _parse(framed: bytes) -> dict[str, Any]:
    try:
        message = loads(framed[_LENGTH:])
    except ValueError as error:
        raise WireError(f"a message is not JSON: {error}") from error
    if type(message) is not dict:
        raise WireError("a message is not a JSON object")
    return message


def _size(message: Mapping[str, Any]) -> int:
    try:
        return check_integer(message.get("bytes", 0))
    except ValueError as error:
        raise WireError(f"a message announces no number of raw bytes: {error}") from error


def _text(message: Mapping[str, Any], field: str) -> str:
    """Returns a short, printable text from a message of a handshake."""
    text = message.get(field)
    if type(text) is not str or len(text) > _MAX_TEXT or not text.isprintable():
        raise WireError(f"the handshake has no sound {field!r}")
    return text


def _say(stream: TimedSocket, message: Mapping[str, Any], until: float) -> None:
    stream.write(_frame(json.dumps(message).encode()), max(0.001, until - time.monotonic()))


def _hear(stream: TimedSocket, until: float) -> dict[str, Any]:
    length = _frame_length(stream.peek(_LENGTH, until), _MAX_HELLO)
    stream.peek(length, until)
    return _parse(stream.take(length))


@contextmanager
def _closed_at_an_error(connection: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise
