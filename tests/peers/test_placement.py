"""Places of copies: any one domain may be lost, and the nodes that are left hold each tensor of a node-safe step."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.format.boxes import Box
from rekindle.format.layout import Chunk, Layout
from rekindle.format.lineage import ShardId
from rekindle.format.receipt import Receipt
from rekindle.memory.nodes import Node, Nodes
from rekindle.peers.unique import UniqueChunks, likely_ranks, ranks_apart
from rekindle.save.partition import Item, partition
from tests.peers.peer import FIRST

Content = tuple[str, int]
"""A tensor's name, and what tells its bytes from others: its group of replicas, or the one rank that has them."""


class Tensor(NamedTuple):
    """One global tensor, of which each rank holds the row of its group."""

    name: str
    groups: list[int]
    """Group of each rank: those of one hold the same bytes."""
    own: bool
    """True if each rank may have bytes of its own."""
    differs: bool
    """True if each rank has bytes of its own, though nobody says so."""

    def chunk(self, rank: int) -> Chunk:
        shape = (max(self.groups) + 1, 4)
        return Chunk(self.name, "uint8", shape, (self.groups[rank], 0), (1, 4), own=self.own)

    def content(self, rank: int) -> Content:
        return self.name, -1 - rank if self.own or self.differs else self.groups[rank]


class Job(NamedTuple):
    """A job on several nodes, all of which hold one step."""

    nodes: list[Node]
    tensors: list[Tensor]

    def receipt(self, rank: int) -> Receipt:
        layout = Layout.build(tensor.chunk(rank) for tensor in self.tensors)
        contents = {tensor.name: str(tensor.content(rank)[1]) for tensor in self.tensors}
        sums = [contents[chunk.name] for chunk in layout.chunks]
        stamp = ShardId(7, rank, len(self.tensors[0].groups), FIRST)
        return Receipt(stamp, layout, 8, "", sums, {}, [], b"")

    def partner(self, number: int) -> Node:
        return self.nodes[Nodes("a" * 16, 1, b"", number, self.nodes).partner]

    def copied(self, node: Node) -> dict[Content, list[int]]:
        """What its partner copies of a node, and the ranks that have it there."""
        apart, found = ranks_apart(self.nodes, node), dict[Content, list[int]]()
        keeper = self.partner(self.nodes.index(node))
        for rank in node.ranks:
            receipt = self.receipt(rank)
            unique = UniqueChunks(receipt)
            for other in [*apart.intersection(keeper.ranks), *likely_ranks(receipt, apart)[:2]]:
                unique.leave_out(self.receipt(other))
            names = {chunk.name for chunk in unique.chunks()}
            for tensor in self.tensors:
                if tensor.name in names:
                    found.setdefault(tensor.content(rank), []).append(rank)
        return found

    def holds(self, node: Node) -> set[Content]:
        return {tensor.content(rank) for rank in node.ranks for tensor in self.tensors}

    def domains(self) -> dict[str, list[Node]]:
        """What fails together; a node without a domain alone."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            found.setdefault(node.domain or f"only {node.name}", []).append(node)
        return found


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    domains = draw(st.lists(st.sampled_from(["", "left", "right", "third"]), min_size=2, max_size=9))
    each = draw(st.integers(1, 3))
    places = draw(st.permutations(range(len(domains))))  # a launcher numbers nodes as it likes
    made = [
        Node(f"n{number}", "h", 1, list(range(place * each, (place + 1) * each)), domain)
        for number, (domain, place) in enumerate(zip(domains, places, strict=True))
    ]
    world = each * len(made)
    groups = st.lists(st.integers(0, 3), min_size=world, max_size=world)
    tensors = [
        Tensor(f"t{number}", draw(groups), draw(st.booleans()), draw(st.booleans()))
        for number in range(draw(st.integers(1, 3)))
    ]
    return Job(sorted(made, key=lambda node: (node.domain, node.name)), tensors)


@settings(max_examples=150, deadline=None)
@given(jobs())
def test_each_tensor_outlives_the_loss_of_any_domain(job: Job) -> None:
    """Of up to half of the nodes: of more than that some would have to copy from each other."""
    for lost in job.domains().values():
        if len(lost) > len(job.nodes) // 2:
            continue
        left = set[Content]()
        for number, node in enumerate(job.nodes):
            left |= set() if node in lost else job.holds(node)
            left |= set() if job.partner(number) in lost else job.copied(node).keys()
        for node in lost:
            assert job.holds(node) <= left


@settings(max_examples=50, deadline=None)
@given(jobs())
def test_nothing_is_copied_that_the_partner_holds_itself(job: Job) -> None:
    """Unless both fail together, or each rank counts on its own only."""
    marked = {tensor.name for tensor in job.tensors if tensor.own}
    for number, node in enumerate(job.nodes):
        partner = job.partner(number)
        if ranks_apart(job.nodes, node).issuperset(partner.ranks):
            assert all(name in marked or (name, part) not in job.holds(partner) for name, part in job.copied(node))


def test_nodes_with_different_numbers_of_ranks_copy_no_tensors_but_those_that_one_of_them_cuts() -> None:
    rows = (900, 20_000, 50, 3_000, 8_000, 100)
    items = [Item(f"t{number}", Box((0, 0), (count, 1024)), 4) for number, count in enumerate(rows)]
    nodes = [(2, [0, 1]), (3, [2, 3, 4])]

    def receipts(count: int, ranks: list[int]) -> list[Receipt]:
        found = []
        for number, rank in enumerate(ranks):
            parts = partition(items, number, count)
            layout = Layout.build(Chunk(item.name, "float32", item.box.sizes, *box) for item, box in parts)
            sums = [f"{chunk.offsets} {chunk.sizes}" for chunk in layout.chunks for _ in range(chunk.block_count)]
            found.append(Receipt(ShardId(7, rank, 5, FIRST), layout, 8, "", sums, {}, [], b""))
        return found

    for (count, ranks), other in zip(nodes, reversed(nodes), strict=True):
        copied = set()
        for receipt in receipts(count, ranks):
            unique = UniqueChunks(receipt)
            for witness in receipts(*other):
                unique.leave_out(witness)
            copied |= {chunk.name for chunk in unique.chunks()}
        assert copied == {"t1", "t3"}, "cut in the middle, and after a third and two thirds"


def test_sixteen_thousand_ranks_have_their_places() -> None:
    """In racks of 16 nodes. With HSDP's replicas in each rack only the small states are copied."""
    nodes = [
        Node(f"n{number:04}", "h", 1, list(range(8 * number, 8 * number + 8)), f"rack{number // 16:03}")
        for number in range(2048)
    ]
    racks = [node.domain for node in nodes]
    tensor = Tensor("w", [rank % 128 for rank in range(16_384)], own=False, differs=False)
    job = Job(nodes, [tensor, tensor._replace(name="own", own=True)])
    for number in (0, 1023, 2047):
        assert job.partner(number).domain != racks[number]
        assert job.copied(nodes[number]).keys() == {("own", -1 - rank) for rank in nodes[number].ranks}
    sharded = job._replace(tensors=[tensor._replace(groups=list(range(16_384)))])
    assert len(sharded.copied(nodes[7])) == 8
    alone = [replace(node, domain="") for node in nodes]
    assert len(ranks_apart(alone, alone[7])) == 16_376
    assert len(ranks_apart(nodes, nodes[7])) == 16_384 - 128
