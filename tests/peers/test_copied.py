"""A rank whose node is lost goes on from the copy of its snapshot, whole or reduced to what nobody else has."""

from __future__ import annotations

import json
import mmap
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
import torch

from rekindle.format.layout import Layout
from rekindle.format.lineage import CheckpointKey, ShardId
from rekindle.format.names import shard_name, step_dir
from rekindle.format.receipt import Receipt, checksum
from rekindle.memory.copies import CopySlots
from rekindle.memory.job_dir import JobDir
from rekindle.memory.nodes import Node, Nodes
from rekindle.memory.slots import Slots
from rekindle.peers.snapshots import snapshot_handlers
from rekindle.restore.candidate import Candidate, Verdict
from rekindle.restore.choose import choose
from rekindle.restore.peers import see_peers
from rekindle.save.capture import Capture
from rekindle.save.copy import ShardWriter
from rekindle.session.inventory import take_inventory
from rekindle.storage.catalog import find_copies, list_checkpoints
from rekindle.storage.posix import PosixStore
from tests.conftest import commit
from tests.peers.peer import FIRST, HOST, SECRET, START, serving

STEP = 7
KEY = CheckpointKey(STEP, FIRST)


def state_of(rank: int, seed: int) -> dict[str, torch.nn.Module]:
    """A replica, which all ranks have alike, and a parameter of which the ranks have different ones."""
    made = torch.Generator().manual_seed(seed)
    model = torch.nn.Module()
    model.replica = torch.nn.Parameter(torch.randn(3000, generator=made))
    model.register_parameter(name(rank), torch.nn.Parameter(torch.randn(2000 + rank, generator=made)))
    return {"model": model}


def name(rank: int) -> str:
    return f"of_rank_{rank}"


def bits(state: dict[str, torch.nn.Module]) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in state["model"].parameters()]


def saved(rank: int) -> tuple[Receipt, bytes, list[torch.Tensor]]:
    """What a rank saves, and the bits that are to come back."""
    state = state_of(rank, 1)
    state["model"].get_parameter(name(rank)).data += rank
    plan, values = Capture(state, rng=False).prepare()
    raw, writer = mmap.mmap(-1, plan.layout.file_bytes), ShardWriter()
    _, sums = writer.write(plan, raw, None, STEP)
    writer.close()
    receipt = Receipt.decode(Receipt.encode(ShardId(STEP, rank, 2, FIRST), plan.static, sums, values), "test")
    return receipt, raw[: receipt.file_bytes], bits(state)


def put_own(job: JobDir, rank: int, slots: list[Slots]) -> None:
    """Puts a rank's whole snapshot into its node's memory."""
    receipt, raw, _ = saved(rank)
    slots.append(Slots(job, rank, 2, [rank]))
    commit(slots[-1], receipt, raw)


def put_copy(job: JobDir, rank: int, without: Collection[str] = ()) -> Path:
    """Puts the copy of a rank's snapshot ``without`` some tensors into its partner's memory. Returns its file."""
    receipt, raw, _ = saved(rank)
    data = raw[receipt.header_bytes :]
    there = {chunk.name: chunk for chunk in receipt.layout.chunks}
    assert there.keys() == {"model.replica", f"model.{name(rank)}"}
    layout = Layout.build(chunk for chunk in there.values() if chunk.name not in without)

    def fill(place: memoryview) -> list[str]:
        for chunk in layout.chunks:
            place[chunk.start : chunk.stop] = data[there[chunk.name].start : there[chunk.name].stop]
        return [checksum(place[start:stop]) for start, stop in layout.blocks]

    def encode(sums: list[str]) -> bytes:
        static = Receipt.static_part(layout, receipt.structure)
        return Receipt.encode(receipt.stamp, static, sums, json.dumps(receipt.values).encode())

    slots = CopySlots(job, [rank], 2, 0)
    slots.write(receipt.stamp, layout, fill, encode)
    slots.close()
    return job.copies.path / step_dir(STEP) / shard_name(rank, 2)


@pytest.fixture
def slots() -> Iterator[list[Slots]]:
    made: list[Slots] = []
    yield made
    for one in made:
        one.close()


def restore(jobs: list[JobDir], nodes: Nodes, root: Path) -> tuple[Verdict, list[torch.Tensor]]:
    """Restores rank 0. ``jobs``: the memory that each rank finds on its node."""
    store = PosixStore(root)
    seen = see_peers([take_inventory(job, store, rank) for rank, job in enumerate(jobs)], 0, nodes)
    assert choose([one.offers for one in seen]).candidates == [KEY]
    assert choose([one.offers for one in seen], STEP).candidates == [KEY], "a person may name it"
    live = state_of(0, 2)
    with Candidate(live, KEY, seen[0].copies[KEY], (0, 2), allow_pickle=False) as candidate:
        candidate.open()
        candidate.fill(None)
        if candidate.verdict.place is not None:
            candidate.load()
        return candidate.verdict, bits(live)


def two_nodes(port: int) -> Nodes:
    return Nodes(START, 2, SECRET, 0, [Node("near", HOST, 1, [0]), Node("far", HOST, port, [1])])


@pytest.mark.parametrize("without", [(), ("model.replica",)], ids=["whole", "reduced"])
def test_a_new_node_reads_the_copy_and_replicas_from_the_partner(near, far, slots, root, without) -> None:
    put_own(far, 1, slots)
    put_copy(far, 0, without)
    with serving(snapshot_handlers(far)) as port:
        verdict, found = restore([near, far], two_nodes(port), root)
    assert verdict.place == "peer" and not verdict.reasons
    assert all(map(torch.equal, found, saved(0)[2]))


@pytest.mark.parametrize("without", [(), ("model.replica",)], ids=["whole", "reduced"])
def test_a_rank_that_begins_on_the_partner_reads_no_network(far, slots, root, without) -> None:
    put_own(far, 1, slots)
    put_copy(far, 0, without)
    verdict, found = restore([far, far], Nodes(START, 2, SECRET, 0, [Node("far", HOST, 1, [0, 1])]), root)
    assert verdict.place == "memory" and not verdict.reasons and not verdict.far
    assert all(map(torch.equal, found, saved(0)[2]))


def test_a_damaged_copy_is_passed_over_for_the_next_source(near, far, slots, root) -> None:
    """The partner's own memory has the first copy; the node behind it has the rank's own snapshot."""
    put_own(far, 1, slots)
    copy = put_copy(far, 0)
    put_own(near, 0, slots)
    raw = bytearray(copy.read_bytes())
    raw[-5] ^= 1
    with open(copy, "r+b") as file:
        file.write(raw)
    with serving(snapshot_handlers(near)) as port:
        nodes = Nodes(START, 2, SECRET, 0, [Node("here", HOST, 1, [0]), Node("far", HOST, port, [1])])
        verdict, found = restore([far, near], nodes, root)
    assert verdict.place == "peer" and any("checksum" in why for why in verdict.reasons)
    assert all(map(torch.equal, found, saved(0)[2]))


def test_a_reduced_copy_alone_is_not_enough(near, far, root) -> None:
    put_copy(far, 0, ("model.replica",))
    put_copy(far, 1, ("model.replica",))
    with serving(snapshot_handlers(far)) as port:
        verdict, _ = restore([near, far], two_nodes(port), root)
    assert verdict.place is None and any("model.replica" in why for why in verdict.reasons)


def test_copies_are_no_snapshots_of_this_node(far, slots, root) -> None:
    put_own(far, 1, slots)
    put_copy(far, 0)
    assert [copy.ranks for copy in find_copies(far, None, own=True)] == [{1}]
    assert [copy.ranks for copy in find_copies(far, None)] == [{1}, {0}]
    assert [entry.step for entry in list_checkpoints(far, PosixStore(root), [1])] == [STEP]
    assert list_checkpoints(far, PosixStore(root), [0]) == []
