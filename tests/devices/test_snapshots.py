"""Snapshots of a device's state, with the host ahead of the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rekindle
from rekindle.memory.job_dir import JobDir, memory_base
from tests.devices.fake import FakeBackend
from tests.devices.training import Training
from tests.save.overlapped import snapshot_of


def check(shard: Path, training: Training, step: int) -> None:
    """The shard holds what ``step`` updates make of the state."""
    expected = training.expected(step)
    found = load_file(shard)
    for name, tensor in found.items():
        key = "moment" if name.endswith("moment") else name
        if key in expected:
            assert torch.equal(tensor, torch.full_like(tensor, expected[key])), (name, step, tensor.unique())
    assert any(name.endswith("moment") for name in found)


def train_and_check(ckpt: rekindle.Checkpointer, training: Training, job: JobDir, steps: int) -> None:
    for step in range(1, steps + 1):
        training.update()
        ckpt.step(step)
        if step > 1:
            ckpt._saver.conclude()
            check(snapshot_of(job, step).with_suffix(".safetensors"), training, step)


@pytest.mark.parametrize("overlap", [False, True])
def test_each_snapshot_holds_its_step(device: FakeBackend, root: Path, memory: Path, overlap: bool) -> None:
    training = Training(device)
    settings: dict[str, Any] = {"snapshot_every": 1, "overlap": overlap, "persist_every": 10**6, "strict": True}
    ckpt = rekindle.Checkpointer(root, training.state, **settings)
    ckpt.restore()
    train_and_check(ckpt, training, JobDir.of(root, memory_base(memory)), 10)
    ckpt.close()
