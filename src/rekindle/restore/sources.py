"""Opens the shards of one checkpoint that a rank can read: its own, those in memory anywhere, those on storage."""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.errors import RekindleError
from rekindle.format.files import Files
from rekindle.format.lineage import CheckpointKey
from rekindle.format.names import receipt_name
from rekindle.format.reader import ShardReader
from rekindle.format.receipt import checksum
from rekindle.storage.catalog import MEMORY, PEER, STORAGE, StoredCopy
from rekindle.storage.verify import read_manifest

__all__ = ["ShardSource", "Sources"]

log = logging.getLogger("rekindle")

_SILENCE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
"""Errors by which a node is known not to answer. It takes seconds until there is one."""


@dataclass(eq=False)
class ShardSource:
    """One shard, open; in memory pinned."""

    rank: int
    place: str
    reader: ShardReader
    cost: int
    """Price of reading it: what several have is read from the cheapest."""

    def close(self) -> None:
        self.reader.close()
        self.reader.shard.close()


class Sources:
    """Opens shards as they are needed: this rank's own, then those in memory, then those elsewhere, more and more."""

    def __init__(self, key: CheckpointKey, copies: Sequence[StoredCopy], home: int) -> None:
        """``copies``: from the nearest to the farthest. ``home``: the rank whose shard is this rank's own.

        Other ranks' are taken from the one behind ``home`` on, so that not all begin with the same one.
        """
        self._key, self._home, self._world = key, home, copies[0].world if copies else 0
        self.opened: list[ShardSource] = []
        self.reasons: list[str] = []
        """Reasons why copies were passed over."""
        self._manifests: dict[Files, dict[str, str]] = {}
        self._silent: set[Files] = set()
        """Copies on nodes that don't answer: to ask such a node for each of its shards would take minutes."""
        order = [
            (place, (rank - home) % copy.world, rank, copy)
            for place, copy in enumerate(copies)
            for rank in sorted(copy.ranks)
        ]
        order.sort(key=lambda entry: entry[:2])
        self._own = [entry for entry in order if entry[2] == home]
        self._others = [entry for entry in order if entry[2] != home]
        self._batch = 1

    @property
    def home(self) -> ShardSource | None:
        """This rank's own shard, the nearest copy that can be opened; None when there is none."""
        for source in self.opened:
            if source.rank == self._home:
                return source
        while self._own:
            place, _, rank, copy = self._own.pop(0)
            if self._open(place, rank, copy):
                return self.opened[-1]
        return None

    @property
    def unseen(self) -> list[int]:
        """Ranks of which no shard is open."""
        return sorted(set(range(self._world)) - {source.rank for source in self.opened})

    def more(self) -> list[ShardSource]:
        """Opens some that haven't been opened; none when there are no more."""
        count = len(self.opened)
        while len(self.opened) == count and (self._others or self._own):
            if self._others and self._others[0][3].place == MEMORY:
                batch = [entry for entry in self._others if entry[3].place == MEMORY]
            else:
                if not self._others:
                    self._others, self._own = self._own, []
                batch = self._others[: self._batch]
                self._batch *= 2
            self._others = self._others[len(batch) :]
            for place, _, rank, copy in batch:
                self._open(place, rank, copy)
        return self.opened[count:]

    def drop(self, source: ShardSource, why: object) -> None:
        """Closes a source that is never to be read again."""
        self.reasons.append(f"{source.place}: {why}")
        self.opened.remove(source)
        source.close()

    def close(self) -> None:
        for source in self.opened:
            source.close()
        self.opened.clear()

    def _open(self, place: int, rank: int, copy: StoredCopy) -> bool:
        """Opens a shard, if it is sound and of this checkpoint; else notes the reason."""
        if copy.files in self._silent:
            return False
        name = receipt_name(rank, copy.world)
        try:
            expected = self._manifest(copy.files).get(name) if copy.place == STORAGE else None
            shard = copy.files.shard(rank, copy.world)
        except (OSError, RekindleError) as error:
            self.reasons.append(f"{copy.place}: {error}")
            if copy.place == PEER and isinstance(error, OSError) and error.errno in _SILENCE:
                self._silent.add(copy.files)
            return False
        reader = ShardReader(shard)
        source = ShardSource(rank, copy.place, reader, 2 * place + (rank != self._home))
        self.opened.append(source)
        stamp = shard.receipt.stamp
        if stamp.checkpoint != self._key or stamp.rank != rank:
            self.drop(source, f"{copy.files.named(name)}: belongs to another checkpoint")
        elif expected is not None and checksum(shard.receipt.raw) != expected:
            self.drop(source, f"{copy.files.named(name)}: is not the receipt that the manifest names")
        else:
            self._check_header(source)
        return source in self.opened

    def _check_header(self, source: ShardSource) -> None:
        """Drops a source whose header is damaged, or can't be read any more."""
        try:
            if not source.reader.header_is_sound():
                self.drop(source, source.reader.shard.corruption(-1))
        except OSError as error:
            self.drop(source, error)

    def _manifest(self, files: Files) -> dict[str, str]:
        if files not in self._manifests:
            entries = read_manifest(files)["shards"]
            self._manifests[files] = {entry["receipt"]: entry["receipt_checksum"] for entry in entries}
        return self._manifests[files]
