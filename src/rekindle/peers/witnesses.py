"""Compares a node's shards with those of ranks that would outlive it, to find what nobody else has of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from rekindle.errors import FormatError
from rekindle.format.files import Directory
from rekindle.format.layout import Chunk
from rekindle.format.lineage import ShardId
from rekindle.format.names import receipt_name, step_dir
from rekindle.format.receipt import Receipt
from rekindle.memory.job_dir import JobDir
from rekindle.memory.nodes import Nodes
from rekindle.peers.unique import UniqueChunks, likely_ranks, ranks_apart

__all__ = ["Ask", "Witnesses"]

_ASKED = 2
"""Ranks of further nodes, at most, whose receipts are fetched for a shard: 100 bytes for each of its tensors."""

Ask = Callable[[int], Receipt | None]
"""Returns the receipt of a rank of a further node, for the same step; None if it can't be had."""


class _Witnesses(NamedTuple):
    """The ranks that have shown chunks of a rank's shards."""

    layout: str
    """Checksum of the shards' header."""
    ranks: list[int]


class Witnesses:
    """Finds the witnesses of one node's shards among this node's own, and those of further nodes. For one thread.

    Checksums are compared at each step. The ranks to compare with are sought once for each layout: a job without
    replicas reads no receipt after the first.
    """

    def __init__(self, job: JobDir, nodes: Nodes) -> None:
        self._job = job
        self._source, self._here = nodes.nodes[nodes.source].ranks, frozenset(nodes.here.ranks)
        self._apart = ranks_apart(nodes.nodes, nodes.nodes[nodes.source])
        self._known: dict[int, _Witnesses] = {}
        """By rank of the source."""

    def unique_chunks(self, receipt: Receipt, ask: Ask) -> list[Chunk]:
        """Returns the chunks of a shard of the source that its loss would take along.

        Precondition: this node has the step too.
        """
        unique, known = UniqueChunks(receipt), self._known.get(receipt.stamp.rank)
        if known is None or known.layout != receipt.header_checksum:
            self._seek(receipt, unique, ask)
        else:
            self._compare(receipt, unique, known.ranks, ask)
        return unique.chunks()

    def _seek(self, receipt: Receipt, unique: UniqueChunks, ask: Ask) -> None:
        """Compares with all ranks that may have replicas, and remembers those that had a box in common."""
        further = likely_ranks(receipt, self._apart - self._here)[:_ASKED]
        found, all_told = self._compare(receipt, unique, [*self._nearest(receipt.stamp.rank), *further], ask)
        if all_told:
            self._known[receipt.stamp.rank] = _Witnesses(receipt.header_checksum, found)

    def _nearest(self, rank: int) -> list[int]:
        """Returns this node's ranks, if it is apart. First the one that copies the same part of what all hold."""
        own = sorted(self._apart & self._here)
        place = self._source.index(rank) % max(len(own), 1)
        return own[place:] + own[:place]

    def _compare(
        self, receipt: Receipt, unique: UniqueChunks, ranks: Iterable[int], ask: Ask
    ) -> tuple[list[int], bool]:
        """Compares with the shards of ``ranks``, one after the other, while that may help.

        Returns the ranks that had a box in common, and True if all receipts could be had.
        """
        found, all_told = [], True
        for rank in ranks:
            if not unique.may_shrink:
                break
            other = self._read(receipt.stamp, rank) if rank in self._here else ask(rank)
            if other is None:
                all_told = False
            elif unique.leave_out(other):
                found.append(rank)
        return found, all_told

    def _read(self, stamp: ShardId, rank: int) -> Receipt | None:
        """Returns the receipt of a rank of this node."""
        files, name = Directory(self._job.path / step_dir(stamp.step), in_memory=True), receipt_name(rank, stamp.world)
        try:
            receipt = Receipt.decode(files.read(name), files.named(name))
        except (OSError, FormatError):
            return None
        return receipt if (receipt.stamp.checkpoint, receipt.stamp.rank) == (stamp.checkpoint, rank) else None
