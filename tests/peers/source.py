"""Another node whose snapshots are copied, and a copy of one."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rekindle.format.files import Directory
from rekindle.format.lineage import ShardId
from rekindle.format.names import step_dir
from rekindle.format.receipt import Receipt
from rekindle.memory.copies import CopySlots
from rekindle.memory.job_dir import JobDir
from rekindle.memory.nodes import Node, Nodes
from rekindle.peers.copying import copy_shard
from rekindle.peers.files import PeerFiles
from rekindle.peers.server import Handler, PeerServer
from rekindle.peers.snapshots import snapshot_handlers
from rekindle.peers.wire import Credentials, Link
from rekindle.storage.verify import verify_shard
from tests.peers.peer import FIRST, HOST, SECRET


def damaged(read: Handler, times: int) -> Handler:
    left = [times]

    def answer(link: Link, message: dict[str, Any]) -> dict[str, Any] | None:
        if not left[0]:
            return read(link, message)
        left[0] -= 1
        size = message["stop"] - message["start"]
        link.send({"bytes": size})
        link.send_bytes(bytes(size))
        return None

    return answer


@contextmanager
def served(job: JobDir, node: Node, damages: int = 0, **handlers: Handler) -> Iterator[Node]:
    """Serves a job's snapshots as those of a node, of which so many reads yield zeros. Gives it with its port."""
    listener = socket.create_server((HOST, 0))
    own = snapshot_handlers(job)
    own["read"] = damaged(own["read"], damages)
    server = PeerServer(listener, lambda: Credentials(SECRET, FIRST.id, node.name), {**own, **handlers})
    server.start()
    try:
        yield replace(node, port=listener.getsockname()[1])
    finally:
        server.close()


@contextmanager
def serving(job: JobDir, damages: int = 0, **handlers: Handler) -> Iterator[Nodes]:
    """Serves node "far", with rank 0. Gives the nodes as the other one, with rank 1, knows them."""
    with served(job, Node("far", HOST, 0, [0]), damages, **handlers) as far:
        yield Nodes(FIRST.id, 1, SECRET, 1, [far, Node("near", HOST, 1, [1])])


def copy(
    near: JobDir,
    nodes: Nodes,
    step: int,
    names: str | None = None,
    take: Callable[[int], object] = lambda nbytes: None,
) -> tuple[Receipt, float]:
    """Copies the tensors of these names. Returns the receipt of the whole shard, and what ``copy_shard`` does."""
    slots = CopySlots(near, [0], 2, 0)
    try:
        with PeerFiles.of(nodes, nodes.nodes[0], ShardId(step, 0, 2, FIRST).checkpoint).shard(0, 2) as shard:
            chunks = [c for c in shard.receipt.layout.chunks if names is None or c.name.removeprefix("v.") in names]
            slots.adopt()
            return shard.receipt, copy_shard(shard, chunks, slots, take)
    finally:
        slots.close()


def tensors_at(job: JobDir, step: int, world: int = 2) -> dict[str, bytes]:
    """The tensors of a shard, whose every byte is verified."""
    with Directory(job.path / step_dir(step), in_memory=True).shard(0, world) as shard:
        assert verify_shard(shard) == []
        data = bytes(shard.map())[shard.receipt.header_bytes :]
        return {c.name.removeprefix("v."): data[c.start : c.stop] for c in shard.receipt.layout.chunks}
