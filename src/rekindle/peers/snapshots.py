"""Gives other nodes the snapshots in this node's memory: lists them, pins one for each connection, and sends its bytes.

Copies of another node's snapshots are among them. Of a shard that is both, the snapshot is given.

::

    {"verb": "list"}                       -> {"shards": [the shard id of each snapshot, and of each copy]}
    {"verb": "open", and a shard id}       -> {"bytes": n}, and n raw bytes: the receipt
    {"verb": "read", "start", "stop"}      -> {"bytes": n}, and n raw bytes of the shard's file
    {"verb": "close"}                      -> {}: the shard is pinned no more

A shard that is gone, or being recycled, is answered by {"gone": why}. Names of files are made from the numbers of a
shard id; no message holds one.
"""

from __future__ import annotations

import errno
import os
from typing import Any

from rekindle.errors import FormatError
from rekindle.format.fields import check_integer
from rekindle.format.lineage import ShardId
from rekindle.format.names import receipt_name, step_dir
from rekindle.format.receipt import parse_stamp
from rekindle.format.shard import open_pinned
from rekindle.memory.job_dir import JobDir
from rekindle.peers.server import Handler
from rekindle.peers.wire import Link

__all__ = ["snapshot_handlers"]


def snapshot_handlers(job: JobDir) -> dict[str, Handler]:
    """Returns what answers other nodes' requests for the snapshots of ``job``, by verb. For any number of threads."""
    serving = _Snapshots(job)
    return {"list": serving.list, "open": serving.open, "read": serving.read, "close": serving.close}


class _Snapshots:
    """Serves the snapshots of one job. Each connection has at most one of them pinned."""

    def __init__(self, job: JobDir) -> None:
        self._job = job
        self._pinned: dict[Link, int] = {}
        """Descriptors of the pinned files, -1 for none. Each connection's entry is used by its own thread only."""

    def list(self, link: Link, message: dict[str, Any]) -> dict[str, Any]:
        found = [stamp for job in (self._job, self._job.copies) for stamp, _ in job.snapshots.shard_ids()]
        return {"shards": [stamp.to_json() for stamp in found]}

    def open(self, link: Link, message: dict[str, Any]) -> dict[str, Any] | None:
        wanted = ShardId.from_json(message)
        if link not in self._pinned:
            self._pinned[link] = -1
            link.attached.callback(self._forget, link)
        self._unpin(link)
        try:
            raw, fd = self._pin(wanted)
        except FileNotFoundError as error:
            return {"gone": error.strerror}
        self._pinned[link] = fd
        link.send({"bytes": len(raw)})
        link.send_bytes(raw)
        return None

    def read(self, link: Link, message: dict[str, Any]) -> dict[str, Any] | None:
        fd = self._pinned.get(link, -1)
        if fd < 0:
            raise FormatError("a shard must be opened before it is read")
        start = check_integer(message.get("start"))
        stop = min(check_integer(message.get("stop"), start), os.fstat(fd).st_size)
        link.send({"bytes": max(0, stop - start)})
        if start < stop:
            link.send_file(fd, start, stop)
        return None

    def close(self, link: Link, message: dict[str, Any]) -> dict[str, Any]:
        self._unpin(link)
        return {}

    def _pin(self, wanted: ShardId) -> tuple[bytes, int]:
        """Returns receipt and descriptor of a snapshot, or else of a copy."""
        try:
            return self._pin_in(self._job, wanted)
        except FileNotFoundError as error:
            try:
                return self._pin_in(self._job.copies, wanted)
            except FileNotFoundError:
                raise error from None

    def _pin_in(self, job: JobDir, wanted: ShardId) -> tuple[bytes, int]:
        """Returns receipt and descriptor of a shard. The reader checks both, receipt and bytes."""
        path = job.path / step_dir(wanted.step) / receipt_name(wanted.rank, wanted.world)
        raw, fd = open_pinned(path)
        try:
            found = parse_stamp(raw, path)
            if (found.checkpoint, found.rank, found.world) != (wanted.checkpoint, wanted.rank, wanted.world):
                raise FileNotFoundError(errno.ENOENT, "is that of another start by now", str(path))
            return raw, fd
        except BaseException:
            os.close(fd)
            raise

    def _unpin(self, link: Link) -> None:
        fd = self._pinned.get(link, -1)
        if fd >= 0:
            self._pinned[link] = -1
            os.close(fd)

    def _forget(self, link: Link) -> None:
        self._unpin(link)
        del self._pinned[link]
