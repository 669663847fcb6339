"""Reads a shard into the tensors that DCP's planner names: only the blocks that they need, each one verified."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import ReadItem

from rekindle.devices.streams import ThreadStreams
from rekindle.devices.table import used
from rekindle.errors import CorruptError, NotFoundError, StateMismatchError
from rekindle.format.boxes import Box
from rekindle.format.layout import Chunk
from rekindle.format.reader import ShardReader, read_blocks
from rekindle.integrations.dcp.checkpoint import Shard
from rekindle.integrations.dcp.items import copyable, wait_for_collective
from rekindle.restore.fill import Filling

__all__ = ["Read", "fill"]

log = logging.getLogger("rekindle")

_STAGED = 256 << 20
"""Bytes that may wait at a time for torch to copy them into place; one tensor's may be more."""


@dataclass
class Read:
    """One item of DCP's plan."""

    item: ReadItem
    number: int
    """Number of its chunk in the shard."""
    target: torch.Tensor


def fill(shard: Shard, reads: list[Read]) -> None:
    """Fills all targets from one rank's shard. Raises CorruptError when no copy has sound bytes for one of them."""
    streams = ThreadStreams(used(read.target for read in reads))
    filling = Filling(shard.receipt.layout, streams)
    for read in reads:
        _add_target(filling, read, shard.receipt.layout.chunks[read.number])
        if filling.staged > _STAGED:
            _read_wanted(shard, filling)
            filling = Filling(shard.receipt.layout, streams)
    _read_wanted(shard, filling)


def _add_target(filling: Filling, read: Read, chunk: Chunk) -> None:
    target, lengths = wait_for_collective(read.target), tuple(read.item.lengths)
    if tuple(target.shape) != lengths:
        raise StateMismatchError(
            f"{read.item.dest_index.fqn}: {lengths} are to be loaded into a tensor of {tuple(target.shape)}"
        )
    if not copyable(target):
        raise StateMismatchError(f"{read.item.dest_index.fqn}: nothing can be loaded into a {type(target).__name__}")
    box = Box(tuple(map(sum, zip(chunk.offsets, read.item.storage_offsets, strict=True))), lengths)
    if box.volume:
        filling.want(read.number, box, box, target)


def _read_wanted(shard: Shard, filling: Filling) -> None:
    """Reads what is wanted from the nearest copy; what is damaged there, from the next one."""
    left, problems = filling.blocks, []
    gone = True
    for place, files in shard.places():
        try:
            with files.shard(shard.rank, shard.receipt.stamp.world) as opened:
                if opened.receipt.checksums != shard.receipt.checksums or opened.receipt.stamp.checkpoint != (
                    shard.receipt.stamp.checkpoint
                ):
                    raise FileNotFoundError(f"{opened.path}: another step has taken its place")
                reader = ShardReader(opened)
                try:
                    bad = read_blocks(reader, filling, left, to_the_end=True)
                finally:
                    reader.close()
        except (OSError, CorruptError) as error:
            gone = gone and isinstance(error, FileNotFoundError)
            problems.append(f"{place}: {error}")
            continue
        if not bad:
            for problem in problems:
                log.warning("step %d: read from %s instead: %s", shard.receipt.stamp.step, place, problem)
            filling.finish()
            return
        gone, left = False, bad
        problems.append(f"{place}: {opened.corruption(bad[0])}")
    why = f"step {shard.receipt.stamp.step} can't be loaded: {'; '.join(problems)}"
    raise NotFoundError(why) if gone else CorruptError(why)
