"""Asks other nodes what their memory holds, for the rebuilding of a dead rank's snapshot."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

from rekindle.errors import FormatError, RekindleError
from rekindle.format.layout import Chunk
from rekindle.format.lineage import CheckpointKey, ShardId
from rekindle.memory.elsewhere import Elsewhere
from rekindle.memory.local_state import LocalFiles
from rekindle.memory.nodes import Node, Nodes
from rekindle.peers.files import PeerFiles
from rekindle.peers.local_states import ask_for_files
from rekindle.peers.wire import Credentials, call, connect

__all__ = ["PeerMemory", "elsewhere_of"]

log = logging.getLogger("rekindle")

_MOST_ASKED = 16
"""Nodes, at most, that are asked for the snapshot of a rank which they don't have now. They may have had it before."""
_PATIENCE = 2.0
"""Seconds in which a node must connect, and then answer. One that was lost with power answers nothing."""
_ALL = 15.0
"""Seconds after which no node is asked any more: all ranks wait for those that rebuild. A question takes at most twice
``_PATIENCE``, unless a node fails in the middle of its answer."""


def elsewhere_of(nodes: Nodes | None) -> Elsewhere:
    """Returns the memory of the other nodes of a start. ``nodes`` is None for a start on one node."""
    return Elsewhere() if nodes is None else PeerMemory(nodes)


class PeerMemory(Elsewhere):
    """The memory of a start's other nodes. A node that fails to answer is not asked again. For one thread."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._until = time.monotonic() + _ALL
        self._snapshots: dict[str, set[tuple[CheckpointKey, int, int]]] = {}
        """By node: checkpoint, rank and world of its snapshots."""
        self._silent: set[str] = set()

    def chunks(self, stamp: ShardId, rank: int) -> tuple[Chunk, ...]:
        for node in self._asked(rank):
            if (stamp.checkpoint, rank, stamp.world) in self._list(node):
                files = PeerFiles.of(self._nodes, node, stamp.checkpoint, _PATIENCE)
                try:
                    with files.shard(rank, stamp.world) as shard:
                        return shard.receipt.layout.chunks
                except (FileNotFoundError, FormatError) as error:  # recycled meanwhile, for one
                    log.info("node %s: rank %d's snapshot of step %d: %s", node.name, rank, stamp.step, error)
                except (OSError, RekindleError) as error:
                    self._give_up(node, error)
        return ()

    def look_again(self) -> None:
        self._snapshots.clear()

    def local_files(self, rank: int) -> LocalFiles | None:
        for node in islice(self._asked(rank), 1):
            try:
                return LocalFiles.decode(ask_for_files(self._nodes, node, rank, _PATIENCE), rank, node.name)
            except (OSError, RekindleError) as error:
                self._give_up(node, error)
        return None

    def _asked(self, rank: int) -> Iterator[Node]:
        """Yields the nodes that may have what a rank has left: first its own, then those that follow this one."""
        own, nodes = self._nodes.own, self._nodes.nodes
        others = [node for node in (*nodes[own + 1 :], *nodes[:own]) if node.port]
        first = [node for node in others if rank in node.ranks]
        for node in first + [node for node in others if node not in first][:_MOST_ASKED]:
            if node.name not in self._silent and time.monotonic() < self._until:
                yield node

    def _list(self, node: Node) -> set[tuple[CheckpointKey, int, int]]:
        if node.name not in self._snapshots:
            self._snapshots[node.name] = set()
            try:
                self._snapshots[node.name].update(self._ask_for_list(node))
            except (OSError, RekindleError) as error:
                self._give_up(node, error)
        return self._snapshots[node.name]

    def _ask_for_list(self, node: Node) -> Iterator[tuple[CheckpointKey, int, int]]:
        link = connect(node.host, node.port, Credentials.of(self._nodes), _PATIENCE, node.name)
        try:
            shards: Any = call(link, {"verb": "list"}, _PATIENCE).get("shards")
        finally:
            link.close()
        for value in shards if type(shards) is list else ():
            stamp = ShardId.from_json(value)
            yield stamp.checkpoint, stamp.rank, stamp.world

    def _give_up(self, node: Node, error: Exception) -> None:
        log.warning(
            "node %s doesn't tell what its memory holds of dead ranks' steps, so an older one may be restored: %s",
            *(node.name, error),
        )
        self._silent.add(node.name)
