"""Memory that others fill: what is saved in it goes to storage all the same, and the log says what has happened."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import rekindle
from rekindle.memory.job_dir import JobDir, memory_base
from tests.stored import newest, sound

SIZE = 8 << 20


class Job:
    """One rank whose steps are small, so that ``step()`` commits them, and whose policy sends nothing to storage."""

    def __init__(self, root: Path, memory: Path, **more: object) -> None:
        self.root, self.memory, self.last = root, memory, 0
        self.weights = torch.zeros(1000)
        state = {"values": rekindle.Values(weights=self.weights)}
        self.ckpt = rekindle.Checkpointer(root, state, memory=memory, memory_headroom=0, persist_every=1000, **more)
        self.ckpt.restore()

    def step(self) -> int:
        self.last += 1
        self.weights.fill_(self.last)
        self.ckpt.step(self.last)
        return self.last

    @property
    def spare(self) -> Path:
        return JobDir.of(self.root, memory_base(self.memory)).path / "rank-00000.spare"

    def fill(self) -> Path:
        filler = self.memory / "somebody else's"
        with open(filler, "ab", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass
        return filler


def test_a_step_that_is_in_full_memory_gets_to_storage_as_asked(
    root: Path, small_tmpfs: Callable[[int], Path], alarms: Callable[[], list[str]]
) -> None:
    job = Job(root, small_tmpfs(SIZE), keep=2, keep_best=("loss", "min"))
    for _ in range(3):
        job.step()
    job.fill()
    for loss in (3.0, 1.0, 2.0):
        job.ckpt.save(job.step(), wait="durable", metrics={"loss": loss}, timeout=30)
        assert newest(root) == job.last
    job.ckpt.save(job.step(), pin=True)
    job.step()
    job.ckpt.close(timeout=30)
    assert sound(root)[0] == job.last == 8 and job.ckpt.metrics.failed == 0
    assert [line for line in alarms() if "step" in line] == []


@pytest.mark.parametrize("pin", [False, True])
def test_without_a_spare_page_the_log_says_that_the_step_is_in_memory(
    pin: bool, root: Path, small_tmpfs: Callable[[int], Path], alarms: Callable[[], list[str]]
) -> None:
    job = Job(root, small_tmpfs(SIZE))
    job.step()
    job.step()
    job.spare.unlink()
    filler = job.fill()
    job.ckpt.save(job.step(), pin=pin)
    assert "step 3 is in memory, but not marked for storage; training goes on: " in alarms()[-1]
    with pytest.raises(rekindle.NotDurableError, match="the part of rank 0 is in memory, but not marked for storage"):
        job.ckpt.save(3, wait="durable", timeout=30)
    assert next(c.step for c in job.ckpt.checkpoints()) == 3
    filler.unlink()
    job.ckpt.close(timeout=30)
    assert sound(root)[0] == 3
