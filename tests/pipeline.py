"""The pipeline between live state and a shard, without the stores."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rekindle.devices.streams import ThreadStreams
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.reader import ShardReader, read_blocks
from rekindle.format.receipt import Receipt
from rekindle.format.shard import OpenShard
from rekindle.restore.fill import Filling
from rekindle.restore.load import build, check_values, load
from rekindle.restore.match import Match, mismatch
from rekindle.restore.reshard import Have, plan
from rekindle.restore.saved import Saved
from rekindle.save.capture import Capture
from rekindle.save.copy import ShardWriter


class Pipeline:
    """What a checkpointer does with its state: saves into one slot after the other, loads from the last one."""

    def __init__(self, state: Mapping[str, Any], *, rng: bool = False, allow_pickle: bool = False) -> None:
        self.capture = Capture(state, rng=rng, allow_pickle=allow_pickle)
        self.writer = ShardWriter()
        self.slots: list[mmap.mmap | None] = [None, None]
        self.caches: list[Any] = [None, None]
        self.saves = 0
        self.receipt: Receipt | None = None

    def save(self) -> Receipt:
        plan, values = self.capture.prepare()
        number = self.saves % 2
        slot = self.slots[number]
        if slot is None or len(slot) != plan.layout.file_bytes:
            self.caches[number] = None
            slot = self.slots[number] = mmap.mmap(-1, plan.layout.file_bytes)
        self.caches[number], sums = self.writer.write(plan, slot, self.caches[number], self.saves)
        stamp = ShardId(self.saves, 0, 1, Incarnation(1, "a" * 16))
        self.saves += 1
        self.receipt = Receipt.decode(Receipt.encode(stamp, plan.static, sums, values), "memory")
        return self.receipt

    def load_into(self, state: Mapping[str, Any], *, rng: bool = False, allow_pickle: bool = False) -> None:
        """The last save into another state: first the check, as a restore does."""
        live = Capture(state, rng=rng).state
        receipt = self.receipt
        check_values(receipt, live, allow_pickle=allow_pickle)
        match = Match(live, Saved(receipt))
        problems = match.problems + [f"{name}: only in the live state" for name in match.lacking]
        problems += [f"{name}: only in the checkpoint" for name in match.surplus]
        if problems:
            raise mismatch(problems)
        wants = match.wants
        chunks = receipt.layout.chunks
        found = plan([want for _, want, _ in wants], [Have(c.name, c.box) for c in chunks])
        assert not found.missing and not match.absent
        filling = Filling(receipt.layout, ThreadStreams([]))
        for move in found.moves:
            filling.want(move.have, move.box, wants[move.want][1].box, wants[move.want][2])
        fd = os.memfd_create("slot")
        os.truncate(fd, receipt.file_bytes)
        with mmap.mmap(fd, receipt.file_bytes) as file:
            file[:] = self.slots[(self.saves - 1) % 2][:]
        with OpenShard(receipt, fd, Path("slot"), in_memory=True) as shard:
            assert read_blocks(ShardReader(shard), filling, filling.blocks) == []
        filling.finish()
        load(live, match, build(live, match, allow_pickle=allow_pickle))
