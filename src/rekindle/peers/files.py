"""Reads snapshots in the memory of another node: the client of ``rekindle.peers.snapshots``."""

from __future__ import annotations

import errno
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from rekindle.format.fields import check_integer
from rekindle.format.files import Files
from rekindle.format.lineage import CheckpointKey, ShardId
from rekindle.format.names import parse_shard_name, receipt_name, shard_name, step_dir
from rekindle.format.receipt import Receipt
from rekindle.format.shard import OpenShard, Receive
from rekindle.memory.nodes import Node, Nodes
from rekindle.peers.wire import Credentials, Link, WireError, call, connect

__all__ = ["PeerFiles"]

_CONNECT_SECONDS = 10.0
"""Bound on making a connection, its handshake included."""
_BUSY_SECONDS = 0.1
"""Pause before the next try at a node that has too many connections."""
_REPLY_SECONDS = 30.0
"""Bound on the wait for a reply. A node that is alive answers within milliseconds, unless it is short of memory."""
_MAX_RECEIPT = 256 << 20
"""Most bytes of a receipt: 100 bytes for each of two million tensors."""
_IDLE_LINKS = 8
"""Connections that a process keeps open while it reads none of them. Each costs the other node a thread."""


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

    @staticmethod
    def of(
        nodes: Nodes, node: Node, key: CheckpointKey, patience: float = math.inf, stall: float | None = None
    ) -> PeerFiles:
        """Returns those of a checkpoint on ``node``, which is another one of ``nodes``."""
        return PeerFiles(node.name, node.host, node.port, Credentials.of(nodes), key, patience, stall)

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
        self._wanted = ShardId(files.key.step, rank, world, files.key.incarnation)
        self._where = files.named(shard_name(rank, world))
        self._receipt: bytes | None = None
        """The receipt, as it was when the shard was opened."""

    def open(self) -> bytes:
        """Pins the shard and returns its receipt. Raises OSError; FileNotFoundError when the shard is gone."""
        _IDLE.put(self, self._connect())
        assert self._receipt is not None
        return self._receipt

    @contextmanager
    def ask(self, start: int, stop: int) -> Iterator[Receive]:
        link = self._request(start, stop)
        try:
            yield partial(self._receive, link)
        except BaseException:
            link.close()  # bytes that nobody takes may still come
            raise
        _IDLE.put(self, link)

    def close(self) -> None:
        _IDLE.close(self)

    def _request(self, start: int, stop: int) -> Link:
        """Returns a connection on which the bytes between two offsets come next."""
        while (link := _IDLE.take(self)) is not None:
            try:
                return self._read(link, start, stop)
            except ConnectionError:
                continue  # it lay idle, and the other node closed it
        return self._read(self._connect(), start, stop)

    def _read(self, link: Link, start: int, stop: int) -> Link:
        with self._closed_at_errors(link):
            size = self._call(link, {"verb": "read", "start": start, "stop": stop}, stop - start)
            if size != stop - start:
                raise OSError(errno.EIO, f"ends {stop - start - size:,} bytes early", self._where)
        return link

    def _connect(self) -> Link:
        """Returns a new connection, for which the shard is pinned."""
        files = self._files
        with self._os_errors():
            link = _connect_to(files)
        with self._closed_at_errors(link):
            raw = bytearray(self._call(link, {"verb": "open", **self._wanted.to_json()}, _MAX_RECEIPT))
            self._receive(link, [memoryview(raw)])
            if self._receipt is None:
                self._receipt = bytes(raw)
            elif raw != self._receipt:
                raise FileNotFoundError(errno.ENOENT, "was recycled meanwhile", self._where)
        return link

    def _call(self, link: Link, message: dict[str, object], most: int) -> int:
        """Returns the number of raw bytes that come after the reply to a request: at most so many."""
        reply = call(link, message, min(_REPLY_SECONDS, self._files.patience))
        if "gone" in reply:
            raise FileNotFoundError(errno.ENOENT, str(reply["gone"]), self._where)
        return check_integer(reply.get("bytes"), 0, most)

    def _receive(self, link: Link, views: list[memoryview]) -> None:
        with self._os_errors():
            link.receive_into(*views, seconds=self._files.stall)

    @contextmanager
    def _closed_at_errors(self, link: Link) -> Iterator[None]:
        try:
            with self._os_errors():
                yield
        except BaseException:
            link.close()
            raise

    @contextmanager
    def _os_errors(self) -> Iterator[None]:
        """Names the shard in each OSError, and makes one of nonsense: the reader goes on to the next copy."""
        try:
            yield
        except (WireError, ValueError) as error:
            raise OSError(errno.EPROTO, str(error), self._where) from error
        except OSError as error:
            raise OSError(_number(error), error.strerror or str(error), self._where) from error


def _connect_to(files: PeerFiles) -> Link:
    """Returns a connection. A node that has as many as it serves closes new ones at once: that one is retried."""
    until = time.monotonic() + min(_CONNECT_SECONDS, files.patience)
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


class _IdleLinks:
    """Keeps connections that are not read at the moment, for the shard each was made for. Safe to use from any thread.

    The oldest are closed when there are many: a rank that reads in a hundred shards would else have a hundred of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: list[tuple[_Remote, Link]] = []

    def put(self, owner: _Remote, link: Link) -> None:
        with self._lock:
            self._links.append((owner, link))
            extra = self._links[:-_IDLE_LINKS]
            del self._links[:-_IDLE_LINKS]
        for _, oldest in extra:
            oldest.close()

    def take(self, owner: _Remote) -> Link | None:
        with self._lock:
            for at, (one, link) in enumerate(self._links):
                if one is owner:
                    del self._links[at]
                    return link
        return None

    def close(self, owner: _Remote) -> None:
        while (link := self.take(owner)) is not None:
            link.close()


_IDLE = _IdleLinks()
