"""Finds out what the memory of a job's other nodes holds, for ``rekindle ls``."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from rekindle.errors import FormatError, RekindleError
from rekindle.format.lineage import CheckpointKey, ShardId
from rekindle.memory.job_dir import JobDir
from rekindle.memory.nodes import Node, Nodes, describe_node
from rekindle.peers.asking import Answer, ask_nodes
from rekindle.peers.files import PeerFiles
from rekindle.storage.catalog import PEER, StoredCopy

__all__ = ["OtherMemory", "look_at_others"]

_ANSWERS_WITHIN = 2.0
"""Seconds that a node gets to list what it has."""


@dataclass(frozen=True)
class OtherMemory:
    """The memory of a job's other nodes, as far as they have told of it."""

    nodes: Nodes
    held: dict[str, list[ShardId]]
    """By name: the shards in the memory of each node that has answered, copies for other nodes included."""
    unreached: list[str]
    """Words for the nodes that no other one can ask, as their agents don't listen."""
    silent: dict[str, str]
    """By words for a node: the reason why it has not answered, though it should."""

    def copies(self) -> list[StoredCopy]:
        """Returns all that the other nodes have of each checkpoint as one copy of it."""
        found: dict[CheckpointKey, list[tuple[Node, ShardId]]] = {}
        for node in self.nodes.nodes:
            for stamp in self.held.get(node.name, ()):
                found.setdefault(stamp.checkpoint, []).append((node, stamp))
        return [self._copy(key, parts) for key, parts in found.items()]

    def _copy(self, key: CheckpointKey, parts: list[tuple[Node, ShardId]]) -> StoredCopy:
        node, first = parts[0]
        stamps = [stamp for _, stamp in parts if (stamp.world, stamp.save) == (first.world, first.save)]
        return StoredCopy(
            *(*key, first.world, PEER, PeerFiles.of(self.nodes, node, key)),
            ranks=frozenset(stamp.rank for stamp in stamps),
            persist=all(stamp.persist for stamp in stamps),
            pinned=any(stamp.pinned for stamp in stamps),
        )

    def holding(self, key: CheckpointKey) -> list[str]:
        """Names the other nodes that have a part of a checkpoint in memory."""
        return [name for name, stamps in self.held.items() if any(stamp.checkpoint == key for stamp in stamps)]

    def without(self, key: CheckpointKey, world: int, here: frozenset[int]) -> list[str]:
        """Names the nodes whose memory lacks what their own ranks saved of a checkpoint; ``here`` are those found here.

        None of a start with another number of ranks, whose nodes were other ones.
        """
        if not self._is_of_these(world):
            return []
        lacking = []
        for number, node in enumerate(self.nodes.nodes):
            stamps = self.held.get(node.name)
            ranks = here
            if number != self.nodes.own:
                if stamps is None:
                    continue  # nobody knows
                ranks = frozenset(stamp.rank for stamp in stamps if stamp.checkpoint == key)
            if not ranks.issuperset(node.ranks):
                lacking.append(node.name)
        return lacking

    def is_complete(self, copy: StoredCopy) -> bool:
        """True if a copy has the parts of all ranks of the other nodes; of all ranks if nodes were other ones then."""
        elsewhere = {rank for node in self.nodes.nodes for rank in node.ranks if node is not self.nodes.here}
        return copy.ranks.issuperset(elsewhere if self._is_of_these(copy.world) else range(copy.world))

    def _is_of_these(self, world: int) -> bool:
        return world == sum(len(node.ranks) for node in self.nodes.nodes)


def look_at_others(job: JobDir) -> OtherMemory | None:
    """Asks the other nodes of the job's newest start what they have. None for a job on one node."""
    nodes = info = None
    with suppress(OSError, FormatError):
        nodes, info = Nodes.read(job), job.read_job()
    if nodes is None or info is None or info.start != nodes.start:
        return None
    others = [node for node in nodes.nodes if node is not nodes.here]
    asked = [node for node in others if node.port]
    answers = ask_nodes(nodes, asked, {"verb": "list"}, _ANSWERS_WITHIN)
    held, silent = {}, {}
    for node, answer in zip(asked, answers, strict=True):
        try:
            held[node.name] = _shards(answer)
        except ConnectionRefusedError:
            silent[_describe(node)] = "no agent listens there"
        except (OSError, RekindleError) as error:
            silent[_describe(node)] = str(error)
    return OtherMemory(nodes, held, [_describe(node) for node in others if not node.port], silent)


def _shards(answer: Answer) -> list[ShardId]:
    """Returns the shards that a node has told of. Raises its error."""
    if isinstance(answer, Exception):
        raise answer
    shards = answer.get("shards")
    return [ShardId.from_json(value) for value in (shards if type(shards) is list else ())]


def _describe(node: Node) -> str:
    return describe_node(node.name, node.ranks)
