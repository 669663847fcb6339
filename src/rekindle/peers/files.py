"""Reads snapshots in the memory of another node: the client of ``rekindle.peers.snapshots``."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rekindle.format.fields import check_integer
from rekindle.format.files import Files
from rekindle.format.lineage import CheckpointKey, ShardId
from rekindle.format.names import parse_shard_name, receipt_name, shard_name, step_dir
from rekindle.format.receipt import Receipt
from rekindle.format.shard import OpenShard, Receive
from rekindle.memory.nodes import Node, Nodes
from rekindle.peers.links import Links
from rekindle.peers.wire import Credentials, Link, WireError, call, connect

__all__ = ["PeerFiles"]

_CONNECT_SECONDS = 10.0
"""Bound on making a connection, its handshake included."""
_AGAIN_SECONDS = 1.0
"""Least time to make a connection in place of one that was kept and answers no more."""
_BUSY_SECONDS = 0.1
"""Pause before the next try at a node that has too many connections."""
_REPLY_SECONDS = 30.0
"""Bound on the wait for a reply. A node that is alive answers within milliseconds, unless it is short of memory."""
_MAX_RECEIPT = 256 << 20
"""Most bytes of a receipt: 100 bytes for each of two million tensors."""
_IDLE = Links(8)
"""Connections of all shards that this process has open."""


@dataclass(frozen=True)
class PeerFiles(Files):
    """The files of one checkpoint in the memory of node ``node``, whose agent listens at ``host`` and ``port``.

    There is no manifest, and of shards only those of that node's ranks.
    """

    node: str
    host: str
    port: int
    credentials: Credentials = field(repr=False)
    key: CheckpointKey
    patience: float = math.inf
    """Seconds in which the node must connect, and then reply, where they are fewer than the usual bounds."""
    stall: float | None = None
    """Seconds without a byte after which a transfer is given up; None for the bound that all transfers have."""
    links: Links | None = field(default=None, repr=False, compare=False)
    """Connections that outlive a shard and serve the next one of the node; None to make one for each shard."""

    @staticmethod
    def of(
        nodes: Nodes,
        node: Node,
        key: CheckpointKey,
        patience: float = math.inf,
        stall: float | None = None,
        links: Links | None = None,
    ) -> PeerFiles:
        """Returns those of a checkpoint on ``node``, which is another one of ``nodes``."""
        return PeerFiles(node.name, node.host, node.port, Credentials.of(nodes), key, patience, stall, links)

    def __str__(self) -> str:
        return f"{self.node}:{step_dir(self.key.step)}"

    def read(self, name: str) -> bytes:
        with self._shard(name, "json") as shard:
            return shard.receipt.raw

    def size(self, name: str) -> int:
        with self._shard(name, "json", "safetensors") as shard:
            return len(shard.receipt.raw) if name.endswith(".json") else shard.receipt.file_bytes

    def shard(self, rank: int, world: int) -> OpenShard:
        remote = _Remote(self, rank, world)
        try:
            raw = remote.open()
            return OpenShard(
                Receipt.decode(raw, self.named(receipt_name(rank, world))),
                -1,
                self.named(shard_name(rank, world)),
                in_memory=False,
                remote=remote,
            )
        except BaseException:
            remote.close()
            raise

    def _shard(self, name: str, *kinds: str) -> OpenShard:
        parsed = parse_shard_name(name)
        if parsed is None or parsed[2] not in kinds:
            raise FileNotFoundError(errno.ENOENT, "is not in the memory of another node", self.named(name))
        return self.shard(parsed[0], parsed[1])


class _Remote:
    """Gives the bytes of one shard of ``files``: a ``Remote``.

    Each thread that reads has a connection of its own, for which the other node pins the shard. One that was closed
    while it lay idle is made anew, if the shard is still the same.
    """

    def __init__(self, files: PeerFiles, rank: int, world: int) -> None:
        self._files = files
        self._links = _IDLE if files.links is None else files.links
        self._peer = files.node, files.host, files.port, files.credentials
        self._wanted = ShardId(files.key.step, rank, world, files.key.incarnation)
        self._where = files.named(shard_name(rank, world))
        self._receipt: bytes | None = None
        """The receipt, as it was when the shard was opened."""

    def open(self) -> bytes:
        """Pins the shard and returns its receipt. Raises OSError; FileNotFoundError when the shard is gone."""
        self._links.put(self, self._connect())
        assert self._receipt is not None
        return self._receipt

    @contextmanager
    def ask(self, start: int, stop: int) -> Iterator[Receive]:
        link = self._request(start, stop)
        try:
            yield partial(self._receive, link)
        except BaseException:
            self._end(link)  # bytes that nobody takes may still come
            raise
        self._links.put(self, link)

    def close(self) -> None:
        while (link := self._links.take(self)) is not None:
            if self._files.links is None:
                link.close()
                continue
            with suppress(OSError), self._closed_at_errors(link):
                self._call(link, {"verb": "close"})
                self._links.put(self._peer, link)

    def _request(self, start: int, stop: int) -> Link:
        """Returns a connection on which the bytes between two offsets come next."""
        while (link := self._links.take(self)) is not None:
            try:
                return self._read(link, start, stop)
            except ConnectionError:
                continue  # it lay idle, and the other node closed it
        return self._read(self._connect(), start, stop)

    def _read(self, link: Link, start: int, stop: int) -> Link:
        with self._closed_at_errors(link):
            size = _size(self._call(link, {"verb": "read", "start": start, "stop": stop}), stop - start)
            if size != stop - start:
                raise OSError(errno.EIO, f"ends {stop - start - size:,} bytes early", self._where)
        return link

    def _connect(self) -> Link:
        """Returns a connection for which the shard is pinned: one that was kept, or a new one."""
        until = time.monotonic() + min(_CONNECT_SECONDS, self._files.patience)
        kept = self._links.take(self._peer)
        if kept is not None:
            with suppress(ConnectionError, TimeoutError):  # a network that was away for long has ended it
                return self._pin(kept)
        with self._os_errors():
            link = _connect_to(self._files, max(until, time.monotonic() + _AGAIN_SECONDS))
        return self._pin(link)

    def _pin(self, link: Link) -> Link:
        with self._closed_at_errors(link):
            reply = self._call(link, {"verb": "open", **self._wanted.to_json()})
            if "gone" not in reply:
                self._check(link, _size(reply, _MAX_RECEIPT))
                return link
        if self._files.links is None:
            link.close()
        else:
            self._links.put(self._peer, link)
        raise FileNotFoundError(errno.ENOENT, str(reply["gone"]), self._where)

    def _check(self, link: Link, size: int) -> None:
        """Receives the receipt of the shard that was pinned, which must be the one that was opened."""
        raw = bytearray(size)
        self._receive(link, [memoryview(raw)])
        if self._receipt is None:
            self._receipt = bytes(raw)
        elif raw != self._receipt:
            raise FileNotFoundError(errno.ENOENT, "was recycled meanwhile", self._where)

    def _call(self, link: Link, message: dict[str, object]) -> dict[str, Any]:
        return call(link, message, min(_REPLY_SECONDS, self._files.patience))

    def _receive(self, link: Link, views: list[memoryview]) -> None:
        with self._os_errors():
            link.receive_into(*views, seconds=self._files.stall)

    @contextmanager
    def _closed_at_errors(self, link: Link) -> Iterator[None]:
        try:
            with self._os_errors():
                yield
        except BaseException:
            self._end(link)
            raise

    def _end(self, link: Link) -> None:
        """Closes a connection, and those that are kept: what it has met may have come to all of them.

        One after the other they would each be waited for.
        """
        link.close()
        if self._files.links is not None:
            self._files.links.close()

    @contextmanager
    def _os_errors(self) -> Iterator[None]:
        """Names the shard in each OSError, and makes one of nonsense: the reader goes on to the next copy."""
        try:
            yield
        except (WireError, ValueError) as error:
            raise OSError(errno.EPROTO, str(error), self._where) from error
        except OSError as error:
            raise OSError(_number(error), error.strerror or str(error), self._where) from error


def _size(reply: dict[str, Any], most: int) -> int:
    """Returns the number of raw bytes that come after a reply: at most so many."""
    return check_integer(reply.get("bytes"), 0, most)


def _connect_to(files: PeerFiles, until: float) -> Link:
    """Returns a connection. A node that has as many as it serves closes new ones at once: that one is retried."""
    while True:
        seconds = max(_BUSY_SECONDS, until - time.monotonic())
        try:
            return connect(files.host, files.port, files.credentials, seconds, files.node)
        except (BrokenPipeError, ConnectionResetError):
            if time.monotonic() > until:
                raise
            time.sleep(_BUSY_SECONDS)


def _number(error: OSError) -> int:
    """Returns the number that makes an error of the same kind."""
    if error.errno is not None:
        return error.errno
    if isinstance(error, TimeoutError):
        return errno.ETIMEDOUT
    return errno.ECONNRESET if isinstance(error, ConnectionError) else errno.EIO
