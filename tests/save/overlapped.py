"""A training whose whole state moves at each step, and its snapshots in memory."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import xxhash

import rekindle
from rekindle.format.names import receipt_name, step_dir
from rekindle.format.receipt import Receipt
from rekindle.memory.job_dir import JobDir
from rekindle.save.pending import PendingSnapshot

WIDTH = 700
"""Makes 8 MB of state: a copy that takes milliseconds."""


class Adversaries:
    """Two networks, two optimizers, dropout, batch statistics, clipping, a schedule: everything moves at each step."""

    def __init__(self, width: int = WIDTH) -> None:
        torch.manual_seed(7)
        random.seed(7)
        self.one = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 8)
        )
        self.two = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Dropout(0.1), torch.nn.Linear(width, width))
        self.first = torch.optim.AdamW(self.one.parameters(), lr=1e-3)
        self.second = torch.optim.SGD(self.two.parameters(), lr=1e-2, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.first, 200)
        self.width = width

    @property
    def state(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "width"}

    def update(self) -> None:
        noise = torch.randn(4, self.width) * random.random()
        loss = (self.two(self.one(noise)) - noise).square().mean()
        self.first.zero_grad()
        self.second.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*self.one.parameters(), *self.two.parameters()], 0.5)
        self.second.step()
        self.first.step()
        self.schedule.step()


def wait_for_memory(ckpt: rekindle.Checkpointer) -> None:
    """Returns when memory for the first snapshots is there, so that none is left out."""
    assert ckpt._saver.memory is not None and ckpt._saver.memory.slots.wait_made(120.0)


def snapshot_of(job: JobDir, step: int) -> Path:
    return job.path / step_dir(step) / receipt_name(0, 1)


def content(receipt: Path) -> tuple[str, Any, Any]:
    """What a snapshot holds, without who saved it when: hash of the shard, and everything else that it says."""
    found = Receipt.decode(receipt.read_bytes(), receipt)
    shard = xxhash.xxh3_128_hexdigest(receipt.with_suffix(".safetensors").read_bytes())
    return shard, found.checksums, (found.structure, found.values)


def pending_of(ckpt: rekindle.Checkpointer) -> PendingSnapshot:
    """The newest save, which is over when this returns."""
    assert ckpt._saver.memory is not None
    pending = ckpt._saver.memory.pending
    assert pending is not None
    pending.commit()
    return pending
