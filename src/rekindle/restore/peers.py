"""Shows each rank what the memory of other nodes holds, as one more place to read checkpoints from.

Copies that a node keeps of another one's snapshots count as what it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rekindle.format.lineage import CheckpointKey
from rekindle.memory.nodes import Nodes
from rekindle.peers.files import PeerFiles
from rekindle.session.inventory import Inventory, Offer
from rekindle.storage.catalog import MEMORY, PEER, StoredCopy

__all__ = ["see_peers"]

_Held = Mapping[CheckpointKey, Mapping[int, StoredCopy]]
"""By checkpoint and node: the part of it in that node's memory."""


def see_peers(inventories: Sequence[Inventory], rank: int, nodes: Nodes) -> list[Inventory]:
    """Adds to the offers of all ranks, and to the copies of ``rank``, what the memory of the other nodes has.

    ``inventories`` are those of all ranks. The same ones make the same offers on every rank. Reads nothing.
    """
    held = _held(inventories, nodes)
    homes = {other: number for number, node in enumerate(nodes.nodes) for other in node.ranks}
    seen = []
    for other, inventory in enumerate(inventories):
        keys = sorted(inventory.copies.keys() | held.keys(), reverse=True)
        offers = [offer for key in keys if (offer := _offer(inventory, key, held.get(key, {}), other, homes[other]))]
        copies = inventory.copies
        if other == rank:
            copies = {key: found for key in keys if (found := _copies(inventory, key, held.get(key, {}), nodes))}
        seen.append(replace(inventory, offers=offers, copies=copies))
    return seen


def _held(inventories: Sequence[Inventory], nodes: Nodes) -> _Held:
    """Finds what each node in the mesh has in memory: ranks of one node see the same, if not at the same moment."""
    held: dict[CheckpointKey, dict[int, StoredCopy]] = {}
    for number, node in enumerate(nodes.nodes):
        for rank in node.ranks if node.port else ():
            for copy in inventories[rank].all_copies:
                if copy.place == MEMORY:
                    there = held.setdefault(copy.checkpoint, {})
                    known = there.get(number, copy)
                    there[number] = replace(copy, ranks=copy.ranks | known.ranks)
    return held


def _offer(
    inventory: Inventory, key: CheckpointKey, held: Mapping[int, StoredCopy], rank: int, number: int
) -> Offer | None:
    """Makes the offer of ``rank``, on node ``number``; None for a checkpoint of which it sees nothing."""
    near = inventory.copies.get(key, [])
    peers = [copy for other, copy in held.items() if other != number]
    if not near and not peers:
        return None
    world = (near or peers)[0].world
    places = list({copy.place: None for copy in near if rank % world in copy.ranks})
    if any(rank % world in copy.ranks for copy in peers):
        places.append(PEER)
    return Offer(*key, world, tuple(places))


def _copies(inventory: Inventory, key: CheckpointKey, held: Mapping[int, StoredCopy], nodes: Nodes) -> list[StoredCopy]:
    """Lists the copies that this node sees: its own memory, the other nodes, storage.

    Each node begins with the one behind it, so that what all want is not read from one.
    """
    near, count = inventory.copies.get(key, []), len(nodes.nodes)
    order = [(nodes.own + step) % count for step in range(1, count)]
    there = [(held[number], nodes.nodes[number]) for number in order if number in held]
    peers = [replace(copy, place=PEER, files=PeerFiles.of(nodes, node, key)) for copy, node in there]
    return [copy for copy in near if copy.place == MEMORY] + peers + [copy for copy in near if copy.place != MEMORY]
