"""A job that is killed while its agent drains an older step, and comes back before that drain has ended."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rekindle
from rekindle.memory.job_dir import JobDir
from tests.faults.harness import Run, build, finish, kill, restored, start, traced, wait_for

SLOW = {"drain_limit": "15kB/s", "idle_timeout": 600.0}
"""Over ten seconds for each of the harness's checkpoints of this width."""
WIDTH = 128


def _kill_while_draining(run: Run, job: JobDir, more: int) -> None:
    """Let an older step's drain begin, and ``more`` steps be made; then kill all ranks."""
    processes = start(run)
    wait_for(lambda: list(run.root.glob("*.partial")), what="a drain")
    made = len(traced(run))
    wait_for(lambda: len(traced(run)) >= made + more, what="newer steps")
    for pid in job.trainers().values():
        kill(pid)
    assert set(finish(processes)) == {-signal.SIGKILL}
    assert not list(run.root.glob("step-*/checkpoint.json")), "the drain was too fast for this test"


@pytest.mark.campaign(seconds=20)
def test_a_restart_with_fewer_ranks_keeps_the_newest_step(root: Path, memory: Path, job: JobDir) -> None:
    before = Run(root, memory, steps=1000, world=2, width=WIDTH, pause=0.02, options=SLOW)
    _kill_while_draining(before, job, 5)
    ranks: dict[int, set[int]] = {}
    for stamp, _ in job.snapshots.shard_ids():
        ranks.setdefault(stamp.step, set()).add(stamp.rank)
    newest = max(step for step, have in ranks.items() if have == {0, 1})

    options: dict[str, Any] = {**SLOW, "snapshot_every": 10_000}  # as if its first step took long
    again = Run(root, memory, steps=5000, width=WIDTH, pause=0.01, options=options)
    processes = start(again)
    durable = wait_for(job.notes.durable, timeout=90, what="the end of the older drain")
    assert durable < newest
    kill(job.trainers()[0])
    assert finish(processes) == [-signal.SIGKILL]
    assert restored(again)[-1] == newest

    last = Run(root, memory, steps=newest + 1, width=WIDTH)
    processes = start(last)
    wait_for(lambda: len(restored(last)) == 3, what="a third start")
    assert restored(last)[-1] == newest, last.log(0).read_text()
    assert finish(processes) == [0]
    wait_for(lambda: not job.path.exists(), what="the memory to be given back")


def test_a_restart_that_saves_the_step_that_is_being_drained_is_no_other_job(
    root: Path, memory: Path, job: JobDir
) -> None:
    before = Run(root, memory, steps=2, width=WIDTH, options=SLOW, pause=600)  # it makes one step
    _kill_while_draining(before, job, 0)
    ckpt = rekindle.Checkpointer(root, build(WIDTH), memory=memory, **SLOW)  # or the drain may be faster than this test
    try:
        assert ckpt.restore() == 1
        ckpt.save(1, wait="memory")
        assert not list(root.glob("step-*/checkpoint.json")), "the drain was too fast for this test"
        info = job.read_job()
        assert info is not None
        job.write_job(replace(info, drain_limit=None))
        ckpt.save(1, wait="durable", timeout=90)
        assert "another start" not in job.notes.drain_error()
        newest = ckpt.latest()
        assert newest is not None and (newest.step, newest.generation) == (1, 2)
    finally:
        ckpt.close(timeout=60)
