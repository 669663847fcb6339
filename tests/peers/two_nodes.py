"""Two nodes with a rank each: what this one, near, writes down as it trains, and the agent of the other one, far."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from rekindle.format.layout import Chunk, Layout
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.receipt import Receipt, checksum
from rekindle.memory.job_dir import JobDir
from rekindle.memory.local_state import LocalStateWriter, padded
from rekindle.memory.nodes import Node, Nodes
from rekindle.memory.slots import Slots
from rekindle.peers.local_states import local_state_handlers
from rekindle.peers.snapshots import snapshot_handlers
from tests.conftest import commit
from tests.peers.peer import FIRST, HOST, SECRET, START, serving

SECOND = Incarnation(2, "b" * 16, FIRST.id, 3)
"""A start that has gone on from step 3."""
LAYOUT = Layout.build([Chunk("buffer", "uint8", (5,), (0,), (5,)), Chunk("weight", "float32", (4,), (0,), (4,))])
STRUCTURE = {"m": {"buffer": {"$tensor": "buffer"}, "weight": {"$tensor": "weight"}}}
REPLICAS = {"weight": [0, 1]}
WORLD = 8


class Rank:
    """A rank that trains, as far as its local states go: two tensors, one of which it alone has."""

    def __init__(self, job: JobDir, rank: int = 0, start: Incarnation = FIRST, *, before_update: bool = False) -> None:
        self.rank, self.start = rank, start
        self.writer = LocalStateWriter(job, rank, before_update=before_update)
        static = Receipt.static_part(LAYOUT, STRUCTURE)
        self.writer.set_plan(self.stamp(0), static, [1], REPLICAS)

    def stamp(self, step: int) -> ShardId:
        return ShardId(step, self.rank, WORLD, self.start, False)

    def put(self, step: int, values: tuple[int, ...] = (), buffer: bytes = b"mine.") -> None:
        body = memoryview(buffer.ljust(padded(5), b"\0"))
        self.writer.write(self.stamp(step), json.dumps(values).encode(), body)


def two_nodes(port: int, own: int = 0) -> Nodes:
    """Rank 0 on node near, which is this one, and rank 1 on node far, which listens on ``port``."""
    return Nodes(START, 2, SECRET, own, [Node("near", HOST, 1, [0]), Node("far", HOST, port, [1])])


@contextmanager
def keeping(far: JobDir, at: int = 0) -> Iterator[int]:
    """The agent of node far. Gives its port."""
    with serving({**local_state_handlers(far, lambda: two_nodes(0, own=1)), **snapshot_handlers(far)}, at) as port:
        yield port


def put_whole(job: JobDir, step: int, rank: int = 1, start: Incarnation = FIRST) -> None:
    """A rank's snapshot, which has all that the rank holds."""
    slots = Slots(job, rank, WORLD, [rank])
    stamp, body = ShardId(step, rank, WORLD, start), bytes(LAYOUT.nbytes)
    static = Receipt.static_part(LAYOUT, STRUCTURE)
    raw = Receipt.encode(stamp, static, [checksum(body[start:stop]) for start, stop in LAYOUT.blocks], b"[]")
    commit(slots, Receipt.decode(raw, "made by hand"), LAYOUT.header + body)
    slots.close()
