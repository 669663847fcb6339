"""Tells which chunks of a rank's shard are held by no node that could outlive the loss of the rank's own.

Nothing is assumed of replicas. A chunk is held elsewhere if the receipt of another rank's shard of the same step has a
chunk of the same box with the same checksums. Pure functions of receipts and of the nodes of a start.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from rekindle.format.layout import Chunk
from rekindle.format.lineage import CheckpointKey
from rekindle.format.receipt import Receipt
from rekindle.memory.nodes import Node

__all__ = ["UniqueChunks", "likely_ranks", "ranks_apart"]

_Box = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Name, dtype, shape of the tensor, offsets and sizes: what a chunk holds, apart from its bytes."""


def ranks_apart(nodes: Sequence[Node], source: Node) -> frozenset[int]:
    """Returns the ranks on nodes that don't fail together with ``source``: those of other domains.

    A node without a domain is a domain of its own.
    """
    apart = [node for node in nodes if node.name != source.name and not (node.domain and node.domain == source.domain)]
    return frozenset(rank for node in apart for rank in node.ranks)


def likely_ranks(receipt: Receipt, ranks: Collection[int]) -> list[int]:
    """Returns those of ``ranks`` that may have replicas of a shard, the next ones first.

    Replicas are as many ranks apart as the tensors have parts: in a mesh whose first dimension replicates, and where
    the ranks of each node divide the copying of what they all hold. A wrong guess costs bytes, never safety.
    """
    rank, world = receipt.stamp.rank, receipt.stamp.world
    shared = [chunk for chunk in receipt.layout.chunks if _may_be_shared(chunk)]
    whole = sum(math.prod(shape) for shape in {chunk.name: chunk.global_shape for chunk in shared}.values())
    part = sum(math.prod(chunk.sizes) for chunk in shared)
    parts = round(whole / part) if part else world
    return sorted((other for other in ranks if (other - rank) % parts == 0), key=lambda other: (other - rank) % world)


class UniqueChunks:
    """The chunks of a shard of which no other shard has shown the same bytes."""

    def __init__(self, receipt: Receipt) -> None:
        self._save, self._chunks = _save(receipt), receipt.layout.chunks
        self._sums = dict(_shared(receipt))
        """Checksums of the chunks that others may hold, and have not shown yet."""

    @property
    def may_shrink(self) -> bool:
        """True while another shard could show bytes of it."""
        return bool(self._sums)

    def leave_out(self, other: Receipt) -> bool:
        """Leaves out what another shard of the step has with the same checksums.

        Returns True if both have a box in common, whatever its bytes. Shards of different saves have nothing in common.
        """
        common = False
        if _save(other) != self._save:
            return False
        for box, sums in _shared(other):
            if box in self._sums:
                common = True
                if self._sums[box] == sums:
                    del self._sums[box]
        return common

    def chunks(self) -> list[Chunk]:
        """Returns the chunks to copy: those that nobody has shown, and a rank's own, whose bytes others don't count."""
        return [chunk for chunk in self._chunks if not _may_be_shared(chunk) or _box(chunk) in self._sums]


def _shared(receipt: Receipt) -> Iterator[tuple[_Box, list[str]]]:
    """Yields the chunks that several ranks may hold, each with its checksums."""
    block = 0
    for chunk in receipt.layout.chunks:
        stop = block + chunk.block_count
        if _may_be_shared(chunk):
            yield _box(chunk), receipt.checksums[block:stop]
        block = stop


def _may_be_shared(chunk: Chunk) -> bool:
    return not chunk.own and chunk.nbytes > 0


def _save(receipt: Receipt) -> tuple[CheckpointKey, int, str]:
    return receipt.stamp.checkpoint, receipt.stamp.world, receipt.stamp.save


def _box(chunk: Chunk) -> _Box:
    return chunk.name, chunk.dtype, chunk.global_shape, chunk.offsets, chunk.sizes
