"""Defines what a rebuild may ask of other nodes' memory."""

from __future__ import annotations

from rekindle.format.layout import Chunk
from rekindle.format.lineage import ShardId
from rekindle.memory.local_state import LocalFiles

__all__ = ["Elsewhere"]


class Elsewhere:
    """The memory of other nodes, of which this class knows nothing: a job on one node has no other."""

    def chunks(self, stamp: ShardId, rank: int) -> tuple[Chunk, ...]:
        """Returns what ``rank`` has in a snapshot of the checkpoint of ``stamp``; nothing if none is found in time."""
        return ()

    def look_again(self) -> None:
        """Has snapshots found that others have taken since the last look. Nodes that failed to answer are left out."""

    def local_files(self, rank: int) -> LocalFiles | None:
        """Returns a rank's local states; None if they can't be had."""
        return None
