"""The memory of other nodes as a place to read from: who sees what of it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.format.files import Directory
from rekindle.format.lineage import CheckpointKey, Incarnation
from rekindle.memory.nodes import Node, Nodes
from rekindle.peers import files as peer_files
from rekindle.peers.files import PeerFiles
from rekindle.peers.snapshots import snapshot_handlers
from rekindle.peers.wire import Credentials
from rekindle.restore.choose import choose
from rekindle.restore.peers import see_peers
from rekindle.restore.sources import Sources
from rekindle.session.inventory import Inventory, Offer
from rekindle.storage.catalog import MEMORY, PEER, STORAGE, StoredCopy
from tests.peers.peer import HOST, far_job, files_at, put, serving

FIRST = Incarnation(1, "a" * 16)
SECRET = bytes(32)


def nodes_of(groups: list[list[int]], own: int, absent: int = -1) -> Nodes:
    made = [Node(f"n{n}", "h", 0 if n == absent else 100 + n, ranks) for n, ranks in enumerate(groups)]
    return Nodes("b" * 16, 2, SECRET, own, made)


def inventory_of(rank: int, world: int, memory: dict[int, set[int]], storage: set[int] = frozenset()) -> Inventory:
    """What a rank lists whose node's memory has these ranks' shards by step, and where storage has these steps."""
    inventory = Inventory(Path("/root"), [], {}, None)
    for step in sorted(memory.keys() | storage, reverse=True):
        copies = []
        if step in memory:
            files = Directory(Path(f"/memory/of/{rank}"), in_memory=True)
            copies.append(StoredCopy(step, FIRST, world, MEMORY, files, frozenset(memory[step]), True))
        if step in storage:
            files = Directory(Path("/storage"))
            copies.append(StoredCopy(step, FIRST, world, STORAGE, files, frozenset(range(world)), True))
        inventory.copies[CheckpointKey(step, FIRST)] = copies
        places = tuple(copy.place for copy in copies if rank % world in copy.ranks)
        inventory.offers.append(Offer(step, FIRST, world, places))
    return inventory


def steps(inventories: list[Inventory]) -> list[int]:
    return [key.step for key in choose([one.offers for one in inventories]).candidates]


def test_a_new_node_goes_on_from_what_another_one_has() -> None:
    """Ranks 2 and 3 have moved onto a node without memory of the job; the old one had kept all shards."""
    groups = [[0, 1], [2, 3]]
    whole = {7: {0, 1, 2, 3}}
    inventories = [inventory_of(rank, 4, whole if rank < 2 else {}) for rank in range(4)]
    assert steps(inventories) == []
    seen = see_peers(inventories, 3, nodes_of(groups, own=1))
    assert steps(seen) == [7]
    assert [offer.places for offer in seen[3].offers] == [(PEER,)] and seen[0].offers[0].places == (MEMORY,)
    (copy,) = seen[3].copies[CheckpointKey(7, FIRST)]
    assert copy.place == PEER and copy.ranks == {0, 1, 2, 3}
    assert copy.files == PeerFiles("n0", "h", 100, Credentials(SECRET, "b" * 16, "n1"), CheckpointKey(7, FIRST))


def test_ranks_that_have_changed_places_find_their_shards_there() -> None:
    inventories = [inventory_of(0, 2, {5: {1}}), inventory_of(1, 2, {5: {0}})]
    for own in range(2):
        seen = see_peers(inventories, own, nodes_of([[0], [1]], own))
        assert steps(seen) == [5]
        assert [copy.place for copy in seen[own].copies[CheckpointKey(5, FIRST)]] == [MEMORY, PEER]


def test_memory_is_nearer_than_other_nodes_and_these_are_nearer_than_storage() -> None:
    inventories = [inventory_of(rank, 3, {4: {0, 1, 2}}, {4}) for rank in range(3)]
    seen = see_peers(inventories, 1, nodes_of([[0], [1], [2]], own=1))
    copies = seen[1].copies[CheckpointKey(4, FIRST)]
    assert [copy.place for copy in copies] == [MEMORY, PEER, PEER, STORAGE]
    assert [copy.files.node for copy in copies if isinstance(copy.files, PeerFiles)] == ["n2", "n0"]
    assert copies[0].files == Directory(Path("/memory/of/1"), in_memory=True)


def test_a_node_that_can_not_be_reached_gives_nothing_and_can_still_take() -> None:
    inventories = [inventory_of(0, 2, {5: {0, 1}}), inventory_of(1, 2, {6: {0, 1}})]
    seen = see_peers(inventories, 0, nodes_of([[0], [1]], own=0, absent=1))
    assert steps(seen) == [5]


def test_what_ranks_of_one_node_saw_at_different_moments_is_put_together() -> None:
    inventories = [inventory_of(0, 4, {5: {0}}), inventory_of(1, 4, {5: {0, 1}}), inventory_of(2, 4, {5: {2, 3}})]
    inventories.append(inventory_of(3, 4, {5: {2, 3}}))
    seen = see_peers(inventories, 2, nodes_of([[0, 1], [2, 3]], own=1))
    peers = [copy for copy in seen[2].copies[CheckpointKey(5, FIRST)] if copy.place == PEER]
    assert [copy.ranks for copy in peers] == [{0, 1}]


def test_a_node_that_does_not_answer_is_asked_for_one_of_its_shards(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks wait while it is asked."""
    job, every = far_job(memory), frozenset(range(4))
    for rank in every:
        put(job, 7, {"a": b"12345"}, rank, 4)
    with socket.create_server((HOST, 0)) as deaf, serving(snapshot_handlers(job)) as port:
        copies = [StoredCopy(7, FIRST, 4, PEER, files_at(at), every, True) for at in (deaf.getsockname()[1], port)]
        sources = Sources(copies[0].checkpoint, copies, 0)
        with monkeypatch.context() as patch:
            patch.setattr(peer_files, "_CONNECT_SECONDS", 0.2)
            assert not sources._open(0, 3, copies[0])
        while sources.more():
            pass
        assert sources.home is not None and sources.unseen == []
        sources.close()
        deaf.setblocking(False)
        deaf.accept()
        with pytest.raises(BlockingIOError):
            deaf.accept()


@given(
    st.lists(st.dictionaries(st.integers(1, 3), st.sets(st.integers(0, 5))), min_size=3, max_size=3),
    st.sets(st.integers(1, 3)),
)
def test_a_step_can_be_gone_on_from_exactly_if_every_shard_is_somewhere(
    memory: list[dict[int, set[int]]], storage: set[int]
) -> None:
    """All ranks decide alike, and none is given another node's directory to read."""
    groups = [[0, 1], [2, 3], [4, 5]]
    inventories = [inventory_of(rank, 6, memory[rank // 2], storage) for rank in range(6)]
    every = [see_peers(inventories, rank, nodes_of(groups, own=rank // 2)) for rank in range(6)]
    assert all([one.offers for one in seen] == [one.offers for one in every[0]] for seen in every)
    whole = {step for step in (1, 2, 3) if set().union(*(node.get(step, set()) for node in memory)) == set(range(6))}
    assert set(steps(every[0])) == whole | storage
    for rank, seen in enumerate(every):
        for copy in seen[rank].all_copies:
            if copy.place == MEMORY:
                assert copy.files == Directory(Path(f"/memory/of/{rank}"), in_memory=True)
