"""Small states are committed inside of ``step()``: a step that has returned is in memory, whoever dies."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.memory.job_dir import JobDir
from rekindle.save.plan import IN_STEP
from rekindle.save.saver import _BEHIND, _IN_STEP
from tests.faults.harness import finish
from tests.fork_server import context

CORRECTED = "are no longer completed inside of step()"
SMALL, LARGE = 100, 1500
"""Widths of a layer that makes 80 kB and 18 MB of state."""


def train_of(width: int, root: Path, **options: Any) -> tuple[torch.nn.Linear, Any, rekindle.Checkpointer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(width, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {"model": model, "optimizer": optimizer}
    ckpt = rekindle.Checkpointer(root, state, persist_every=10**6, **options)
    ckpt.restore()
    return model, optimizer, ckpt


def update(model: torch.nn.Linear, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, model.in_features)).square().mean().backward()
    optimizer.step()


def in_memory(job: JobDir) -> list[int]:
    return sorted(stamp.step for stamp, _ in job.snapshots.shard_ids())


@pytest.mark.parametrize(
    ("width", "options", "promised"),
    [
        (SMALL, {}, True),
        (LARGE, {}, False),
        (SMALL, {"overlap": True}, False),
        (SMALL, {"snapshot_every": 1}, True),
        (LARGE, {"overlap": False}, True),
    ],
)
def test_a_step_of_a_small_state_is_in_memory_when_it_returns(
    width: int,
    options: dict[str, Any],
    promised: bool,
    root: Path,
    memory: Path,
    job: JobDir,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "rekindle"):
        model, optimizer, ckpt = train_of(width, root, **options)
    assert ckpt.metrics.committed_in_step is promised
    assert ((_IN_STEP in caplog.text), (_BEHIND in caplog.text)) == (promised, not promised)
    assert ckpt._saver.memory is not None
    ckpt._saver.memory._live.writer._behind.submit(partial(time.sleep, 0.3))  # no copy behind step() can begin before
    update(model, optimizer)
    ckpt.save(1)
    assert in_memory(job) == [1] * promised
    assert ckpt.metrics.committed_in_step is promised
    ckpt.close()


def test_a_state_that_outgrows_the_limit_is_told_of_once(
    root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = rekindle.Values(table=torch.zeros(8))
    model = torch.nn.Linear(SMALL, SMALL)
    optimizer = torch.optim.SGD(model.parameters())
    ckpt = rekindle.Checkpointer(root, {"model": model, "optimizer": optimizer, "values": values}, persist_every=10**6)
    ckpt.restore()
    ckpt.step(1)
    assert ckpt.metrics.committed_in_step
    values.table = torch.zeros(IN_STEP // 4)
    ckpt.step(2)  # its memory is being made
    assert not ckpt.metrics.committed_in_step and ckpt.metrics.left_out == 1
    for step in (3, 4):
        assert ckpt._saver.memory is not None and ckpt._saver.memory.slots.wait_made(60.0)
        optimizer.step()
        ckpt.step(step)
        assert not ckpt.metrics.committed_in_step
    assert caplog.text.count(CORRECTED) == 1 and "from step 3 on" in caplog.text
    ckpt.close()


class ByHand:
    """An optimizer that is not torch's: nothing announces its updates but ``updating()``."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.param_groups = [{"params": list(parameters), "lr": 0.1}]
        self.state: dict[Any, Any] = {}

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:  # type: ignore[attr-defined]
                parameter.sub_(0.1)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize(("width", "overlap"), [(2500, "auto"), (SMALL, True)])
def test_updates_that_are_announced_by_hand_correct_what_the_start_has_said(
    width: int, overlap: Any, root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Until the first one nothing is known to last behind ``step()``, however large it is."""
    model = torch.nn.Linear(width, width)
    optimizer = ByHand(model.parameters())
    options = {"persist_every": 10**6, "overlap": overlap}
    with caplog.at_level(logging.INFO, "rekindle"):
        ckpt = rekindle.Checkpointer(root, {"model": model, "optimizer": optimizer}, **options)
        ckpt.restore()
    assert _IN_STEP in caplog.text and ckpt.metrics.committed_in_step
    for step in (1, 2):
        assert ckpt._saver.memory is not None and ckpt._saver.memory.slots.wait_made(60.0)
        with ckpt.updating():
            optimizer.step()
        ckpt.save(step)
        assert not ckpt.metrics.committed_in_step
    corrected = f"snapshots, of {model.weight.nbytes / 1e6:.1f} MB now, {CORRECTED}, from step 1 on: {_BEHIND}"
    assert caplog.text.count(corrected) == 1, caplog.text
    ckpt.close()


def test_memory_that_refuses_a_small_state_is_told_of_by_the_step_that_meets_it(
    root: Path, memory: Path, job: JobDir, caplog: pytest.LogCaptureFixture
) -> None:
    *_, ckpt = train_of(SMALL, root)
    ckpt.step(1)
    (job.path / "step-0000000002").write_text("in the way")
    ckpt.step(2)
    assert "step 2 goes straight to storage" in caplog.text and not ckpt.metrics.committed_in_step
    (job.path / "step-0000000002").unlink()
    ckpt.close()


def _rank(rank: int, widths: list[int], root: Path, memory: Path, rendezvous: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    trace = os.open(Path(rendezvous).with_name("trace"), os.O_WRONLY | os.O_APPEND)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=len(widths))
    model, optimizer, ckpt = train_of(widths[rank], root, memory=memory)
    for step in (1, 2, 3):
        update(model, optimizer)
        ckpt.step(step)
    os.write(trace, b"%d\n" % ckpt.metrics.committed_in_step)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("other", [SMALL + 1, LARGE])
def test_all_ranks_commit_inside_of_step_or_none(
    other: int, root: Path, memory: Path, job: JobDir, tmp_path: Path
) -> None:
    """With a large snapshot among them, no rank's is worth holding up training for."""
    trace = os.open(tmp_path / "trace", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    arguments = [SMALL, other], root, memory, str(tmp_path / "rendezvous")
    processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in (0, 1)]
    for process in processes:
        process.start()
    assert finish(processes) == [-9, -9]
    promised = other != LARGE
    assert os.pread(trace, 100, 0) == b"%d\n" % promised * 2
    if promised:
        assert {stamp.rank for stamp, _ in job.snapshots.shard_ids() if stamp.step == 3} == {0, 1}


def test_all_threads_share_in_what_a_gasp_copies(root: Path, memory: Path) -> None:
    model, optimizer, ckpt = train_of(LARGE, root)
    with ckpt.guard(watchdog=False, notices=()):
        update(model, optimizer)
        ckpt.step(1)
        saver = ckpt._saver
        plan = saver.live.plan(saver.session.shard_id(1), whole=True)
        assert len(plan.late) == 2, "weights and moments"
    ckpt.close()
