"""What a rank tells of its saves: in its own numbers, and on the page that other processes read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import rekindle
from rekindle.memory.costs import rank_costs
from rekindle.memory.job_dir import JobDir, memory_base


def test_the_page_tells_what_the_metrics_do(memory: Path, root: Path) -> None:
    model = torch.nn.Linear(4, 4)
    with rekindle.Checkpointer(root, {"model": model}, overlap=True) as ckpt:
        for n in range(1, 6):
            model.weight.data.add_(1.0)
            ckpt.step(n)
        ckpt.save(5)
        costs = rank_costs(JobDir.of(root, memory_base(memory)))[0]
        told = ckpt.metrics
        assert (costs.pid, costs.generation, costs.step, costs.steps) == (os.getpid(), 1, 5, 5)
        assert (costs.saves, costs.snapshot_bytes, costs.failed) == (5, told.bytes_saved, 0)
        assert told.saves == 5
        assert costs.step_seconds.count == 4  # between five ends of steps
        assert costs.stalls.count == told.saves  # the newest one has been waited for
        assert costs.stalls.total == pytest.approx(sum(told.stalls), rel=0.01)
        assert 0 < costs.snapshot_seconds == told.snapshot_seconds


def test_a_start_tells_what_it_restored(memory: Path, root: Path) -> None:
    values = rekindle.Values(a=1)
    with rekindle.Checkpointer(root, {"values": values}) as ckpt:
        for n in (1, 2):
            ckpt.step(n)
    with rekindle.Checkpointer(root, {"values": values}) as ckpt:
        ckpt.restore()
        costs = rank_costs(JobDir.of(root, memory_base(memory)))[0]
        assert (costs.restored_step, costs.step, costs.steps, costs.saves) == (2, 2, 0, 0)
        assert costs.restore_seconds == ckpt.metrics.restore_seconds > 0
        ckpt.save(2)  # no new step
        ckpt.step(3)
        costs = rank_costs(JobDir.of(root, memory_base(memory)))[0]
        assert (costs.step, costs.steps) == (3, 1)


def test_a_failed_save_is_told(memory: Path, root: Path) -> None:
    values = rekindle.Values(a=1)
    with rekindle.Checkpointer(root, {"values": values}) as ckpt:
        ckpt.step(1)
        values.a = object()
        ckpt.step(2)
        assert rank_costs(JobDir.of(root, memory_base(memory)))[0].failed == ckpt.metrics.failed == 1
        values.a = 2
        ckpt.step(3)


def test_the_numbers_are_a_plain_dict(memory: Path, root: Path) -> None:
    with rekindle.Checkpointer(root, {"values": rekindle.Values(a=1)}) as ckpt:
        ckpt.step(1)
        told = ckpt.metrics.to_dict()
    assert told["rekindle/saves"] == 1 and told["rekindle/committed_in_step"] == 1.0
    assert all(type(name) is str and type(value) is float for name, value in told.items())
    assert {"rekindle/last_stall", "rekindle/bytes_saved", "rekindle/restored_step"} <= told.keys()
    assert not {"rekindle/stalls", "rekindle/restored_from"} & told.keys()


def test_tensorboard_takes_the_numbers(memory: Path, root: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path / "board"))
    with rekindle.Checkpointer(root, {"values": rekindle.Values(a=1)}) as ckpt:
        for step in range(1, 4):
            ckpt.step(step)
            for name, value in ckpt.metrics.to_dict().items():
                writer.add_scalar(name, value, step)
    writer.close()
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("rekindle/saves")] == [(1, 1), (2, 2), (3, 3)]
