"""Tells which chunks of a rank's shard are held by no node that could outlive the loss of the rank's own.

Pure functions of the nodes of a start and of the plan that a rank's local states follow, which names its replicas.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rekindle.format.layout import Chunk, Layout
from rekindle.memory.local_state import LocalStatePlan
from rekindle.memory.nodes import Node

__all__ = ["is_planned", "ranks_apart", "unique_chunks"]

_Planned = dict[str, list[tuple[Chunk, bool]]]
"""By name of a tensor: its chunks by the plan, each with True if local states hold it."""


def ranks_apart(nodes: Sequence[Node], source: Node) -> frozenset[int]:
    """Returns the ranks on nodes that don't fail together with ``source``: those of other domains.

    A node without a domain is a domain of its own.
    """
    apart = [node for node in nodes if node.name != source.name and not (node.domain and node.domain == source.domain)]
    return frozenset(rank for node in apart for rank in node.ranks)


def unique_chunks(layout: Layout, plan: LocalStatePlan | None, apart: Collection[int]) -> list[Chunk]:
    """Returns the chunks of a shard that must be copied: those of which none of the ranks ``apart`` has the bytes.

    ``plan`` is that of the shard's rank. Chunks that it doesn't know are copied, and so are all without a plan.
    """
    planned = _planned(plan)
    return [chunk for chunk in layout.chunks if plan is None or not _is_held(chunk, planned, plan, apart)]


def is_planned(layout: Layout, plan: LocalStatePlan | None) -> bool:
    """True if the plan knows all chunks of a shard. One that was made for another layout may not."""
    planned = _planned(plan)
    return all(_find(chunk, planned) is not None for chunk in layout.chunks)


def _planned(plan: LocalStatePlan | None) -> _Planned:
    found: _Planned = {}
    if plan is not None:
        kept, block = set(plan.blocks), 0
        for chunk in plan.layout.chunks:
            found.setdefault(chunk.name, []).append((chunk, block in kept))
            block += chunk.block_count
    return found


def _is_held(chunk: Chunk, planned: _Planned, plan: LocalStatePlan, apart: Collection[int]) -> bool:
    found = _find(chunk, planned)
    if found is None or not chunk.nbytes or chunk.own or found[0].own or found[1]:
        return False
    return any(rank in apart for rank in plan.replicas.get(chunk.name, ()))


def _find(chunk: Chunk, planned: _Planned) -> tuple[Chunk, bool] | None:
    """Returns the planned chunk that a chunk is, or of which it is some rows: ranks of a node divide their replicas."""
    for whole, kept in planned.get(chunk.name, ()):
        if (whole.dtype, whole.global_shape) == (chunk.dtype, chunk.global_shape) and _contains(whole, chunk):
            return whole, kept
    return None


def _contains(whole: Chunk, part: Chunk) -> bool:
    spans = zip(whole.offsets, whole.sizes, part.offsets, part.sizes, strict=True)
    return all(start <= at and at + size <= start + length for start, length, at, size in spans)
