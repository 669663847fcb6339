"""Makes shards for tests, without torch."""

from __future__ import annotations

from collections.abc import Mapping

from rekindle.format.layout import Chunk, Layout
from rekindle.format.lineage import ShardId
from rekindle.format.receipt import Receipt, checksum

__all__ = ["make_shard"]


def make_shard(stamp: ShardId, data: Mapping[str, bytes]) -> tuple[Receipt, bytes]:
    """Returns a receipt and its shard's bytes: byte tensors in a ``Values`` that the state calls "v"."""
    layout = Layout.build(Chunk(f"v.{n}", "uint8", (len(b),), (0,), (len(b),)) for n, b in data.items())
    body = b"".join(data[chunk.name.removeprefix("v.")] for chunk in layout.chunks)
    sums = [checksum(body[start:stop]) for start, stop in layout.blocks]
    static = Receipt.static_part(layout, {"v": {name: {"$tensor": f"v.{name}"} for name in data}})
    return Receipt.decode(Receipt.encode(stamp, static, sums, b"[]"), "made by hand"), layout.header + body
