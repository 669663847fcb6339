"""Checkpoints of which a shard can't be read, as when the node that has it is lost while others restore."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from rekindle.errors import StateMismatchError
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.names import shard_name, step_dir
from rekindle.format.receipt import Receipt
from rekindle.restore.restore import restore
from rekindle.save.capture import Capture
from rekindle.save.copy import ShardWriter
from rekindle.session.group import SingleProcess
from rekindle.storage.posix import PosixStore


def stages(*names: str, value: float = 0.0) -> dict[str, torch.nn.Module]:
    module = torch.nn.Module()
    for name in names:
        module.register_parameter(name, torch.nn.Parameter(torch.full((5,), float(value))))
    return {"model": module}


def save(store: PosixStore, step: int) -> None:
    """A rank for each of two stages of a pipeline."""
    for rank, name in enumerate("ab"):
        plan, values = Capture(stages(name, value=step), rng=False).prepare()
        slot = mmap.mmap(-1, plan.layout.file_bytes)
        writer = ShardWriter()
        _, sums = writer.write(plan, slot, None, step)
        writer.close()
        stamp = ShardId(step, rank, 2, Incarnation(1, "a" * 16))
        receipt = Receipt.decode(Receipt.encode(stamp, plan.static, sums, values), "test")
        store.write_shard(receipt, memoryview(slot), lambda nbytes: None)
    assert store.publish(receipt.stamp)


def test_what_only_an_unreadable_shard_has_is_no_mismatch(root: Path) -> None:
    """The job goes on from the step before. It would end for good if its state seemed not to fit."""
    store, live = PosixStore(root), stages("a", "b")
    save(store, 1)
    save(store, 2)
    (root / step_dir(2) / shard_name(1, 2)).unlink()
    done, _ = restore(SingleProcess(), live, None, store, None, allow_pickle=False)
    assert done is not None and done.step == 1
    assert [tensor.sum().item() for tensor in live["model"].parameters()] == [5.0, 5.0]
    with pytest.raises(StateMismatchError, match=r"model\.c: only in the live state"):
        restore(SingleProcess(), stages("a", "b", "c"), None, store, 1, allow_pickle=False)
