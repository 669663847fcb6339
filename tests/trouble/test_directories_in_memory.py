"""A directory lies where the memory store has a file: training starts, goes on and ends all the same."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import pytest
import torch

import rekindle
from rekindle.memory.job_dir import JobDir, memory_base
from tests.faults.harness import end_agent, wait_for
from tests.fork_server import run_and_kill
from tests.stored import newest, sound


class Job:
    """A job of one rank whose policy sends nothing to storage."""

    def __init__(self, root: Path, memory: Path) -> None:
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        state = {"model": self.model, "optimizer": self.optimizer}
        self.ckpt = rekindle.Checkpointer(root, state, memory=memory, persist_every=1000, snapshot_every=2)
        self.last = self.restored = self.ckpt.restore()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for parameter in self.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            self.optimizer.step()
            self.last += 1
            self.ckpt.step(self.last)


def train_in_guard(root: Path, memory: Path) -> None:
    """Leaves snapshots of steps 4 and 6, and the local state of step 7, and is killed."""
    job = Job(root, memory)
    with job.ckpt.guard():
        job.train(2)
        job.ckpt.save(2, wait="durable", timeout=60)
        job.train(5)
        end_agent(JobDir.of(root, memory_base(memory)))
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("patterns", "restored"),
    [
        (["step-*6/shard-*.json"], 4),
        (["step-*6/shard-*.safetensors"], 4),
        (["rank-*.plan", "rank-*.small-[01]", "rank-*.spare", "durable"], 6),
    ],
    ids=["a receipt", "a shard", "small files"],
)
def test_a_directory_in_place_of_a_file(
    patterns: list[str], restored: int, root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_and_kill(train_in_guard, root, memory)
    directory = JobDir.of(root, memory_base(memory)).path
    found = [path for pattern in patterns for path in directory.glob(pattern)]
    assert len(found) >= len(patterns)
    for path in found:
        path.unlink()
        path.mkdir()
        (path / "in the way").touch()
    job = Job(root, memory)
    assert job.restored == restored
    with job.ckpt.guard():
        job.train(4)
    job.ckpt.save(job.last, wait="durable", timeout=60)
    assert newest(root) == job.last == restored + 4
    job.train(2)
    job.ckpt.close(timeout=60)
    assert sound(root)[0] == restored + 6
    wait_for(lambda: not directory.exists())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
