"""Reads the files of one start's step in an object store."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rekindle.format.files import Files
from rekindle.format.names import MANIFEST, receipt_name, shard_name, step_dir
from rekindle.format.receipt import Receipt
from rekindle.format.shard import OpenShard
from rekindle.storage.bucket import Bucket

__all__ = ["StepObjects"]


@dataclass(frozen=True)
class StepObjects(Files):
    """The files of one incarnation's step. The manifest is that of the incarnation that has published the step."""

    bucket: Bucket
    step: int
    directory: str

    def __str__(self) -> str:
        return f"{self.bucket.url}/{self.directory}"

    def named(self, name: str) -> str:
        return f"{self.bucket.url}/{self._key(name)}"

    def _key(self, name: str) -> str:
        return f"{step_dir(self.step)}.json" if name == MANIFEST else f"{self.directory}/{name}"

    def read(self, name: str) -> bytes:
        return self.bucket.get(self._key(name))[0]

    def size(self, name: str) -> int:
        return self.bucket.head(self._key(name)).size

    def shard(self, rank: int, world: int) -> OpenShard:
        name = shard_name(rank, world)
        receipt = Receipt.decode(self.read(receipt_name(rank, world)), self.named(receipt_name(rank, world)))
        receipt.check_size(self.size(name), self.named(name))
        stream = partial(self.bucket.stream, self._key(name))
        return OpenShard(receipt, -1, self.named(name), in_memory=False, stream=stream)
