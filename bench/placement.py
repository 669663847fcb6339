"""Cost of many nodes for each of them: ``python bench/placement.py``. Seconds and memory until it knows what to copy.

What one node does at a start of so many ranks, eight on each node, sixteen nodes in a rack: it orders all nodes, writes
and reads their record, finds the ranks that don't fail together with those it copies, and chooses what to copy of
eight shards, of which it compares the checksums with those of its own ones: of an FSDP job all, of an HSDP job with a
replica in each rack nothing.
"""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from rich.console import Console

from rekindle.format.layout import Chunk, Layout
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.receipt import Receipt
from rekindle.memory.job_dir import JobDir
from rekindle.memory.nodes import Nodes
from rekindle.peers.unique import UniqueChunks, likely_ranks, ranks_apart
from rekindle.session.nodes import Introduction, arrange

_DOCS = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
_RANKS = (256, 1024, 4096, 16384)
_ON_NODE, _IN_RACK, _TENSORS = 8, 16, 1000
_HEADS = ("ranks", "to know all nodes, s", "FSDP: to choose, s", "HSDP: to choose, s", "MiB")


def _meet(ranks: int, place: Path) -> Nodes:
    """Returns the nodes as the record of a middle one has them."""
    count = ranks // _ON_NODE
    introductions = [
        Introduction(
            name=f"host{number:05}",
            address=("10.0.0.1", 1),
            ranks=list(range(_ON_NODE * number, _ON_NODE * (number + 1))),
            domain=f"rack{number // _IN_RACK:04}",
            secret=bytes(32),
        )
        for number in range(count)
    ]
    session: Any = SimpleNamespace(rank=ranks // 2, agreed=SimpleNamespace(incarnation=Incarnation(1, "ab" * 8)))
    job = JobDir(place)
    arrange(introductions, session).write(job)
    found = Nodes.read(job)
    assert found is not None
    return found


def _receipt(rank: int, world: int, replicas: int) -> Receipt:
    """Returns the receipt of a rank that has one part of many tensors, of which there are so many replicas."""
    parts = world // replicas
    part = rank % parts
    layout = Layout.build(Chunk(f"t{n:04}", "float32", (4 * parts,), (4 * part,), (4,)) for n in range(_TENSORS))
    stamp = ShardId(1, rank, world, Incarnation(1, "ab" * 8))
    return Receipt(stamp, layout, 8, "", [f"{part:016x}"] * _TENSORS, {}, [], b"")


def _choose(nodes: Nodes, replicas: int) -> int:
    """Chooses what to copy of all ranks of a node. Returns the number of chunks."""
    source, here = nodes.nodes[nodes.source], nodes.here.ranks
    world = sum(len(node.ranks) for node in nodes.nodes)
    apart, chosen = ranks_apart(nodes.nodes, source), 0
    for place, rank in enumerate(source.ranks):
        receipt = _receipt(rank, world, replicas)
        unique = UniqueChunks(receipt)
        for other in [*here[place:], *here[:place], *likely_ranks(receipt, apart)[:2]]:
            if unique.may_shrink:
                unique.leave_out(_receipt(other, world, replicas))
        chosen += len(unique.chunks())
    return chosen


def _row(ranks: int) -> tuple[str, ...]:
    racks = ranks // _ON_NODE // _IN_RACK
    with tempfile.TemporaryDirectory() as place:
        began = time.perf_counter()
        nodes = _meet(ranks, Path(place))
        met = time.perf_counter()
        assert _choose(nodes, 1) == _ON_NODE * _TENSORS
        sharded = time.perf_counter()
        assert _choose(nodes, racks) == 0
        hybrid = time.perf_counter()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return f"{ranks:,}", *(f"{s:.3f}" for s in (met - began, sharded - met, hybrid - sharded)), str(memory)


@click.command(help=__doc__)
@click.option("--docs", is_flag=True, help="Put the table into docs/benchmarks.md.")
def main(docs: bool) -> None:
    from report import Table, console_table, markdown, put_blocks

    table = Table("placement", "One node of many", list(_HEADS), [list(_row(ranks)) for ranks in _RANKS])
    console_table(Console(width=120), table)
    if docs:
        put_blocks(_DOCS, {"placement": markdown(table)})


if __name__ == "__main__":
    main()
