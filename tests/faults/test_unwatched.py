"""Deaths of ranks that no agent watches at that moment: the next agent tells the survivors of them."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import rekindle
from rekindle.faults.torchelastic import SURVIVOR_EXIT
from rekindle.memory.job_dir import JobDir
from tests.faults.harness import wait_for
from tests.fork_server import context

_AFTER = 3
"""Step after which rank 1 dies."""


@pytest.fixture
def go(tmp_path: Path, job: JobDir) -> Iterator[Path]:
    """Makes an interpreter, ``late-python``, that begins once this path is there, at the latest when the test ends."""
    go, late = tmp_path / "go", tmp_path / "late-python"
    late.write_text(f'#!/bin/sh\nwhile [ ! -e "{go}" ]; do sleep 0.02; done\nexec "{sys.executable}" "$@"\n')
    late.chmod(0o700)
    yield go
    go.touch()


def _rank(root: Path, memory: Path, rank: int, agent: str, place: Path) -> None:
    """Trains some steps. Then rank 1 is killed, and rank 0 stays where no collective tells it of that."""
    os.dup2(os.open(place / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT), 2)
    logging.basicConfig(level=logging.INFO, force=True, format="%(message)s")
    if agent == "late":
        sys.executable = str(place / "late-python")
    dist.init_process_group("gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=2)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    options = {"memory": memory, "snapshot_every": 1, "persist_every": 10**9, "fallback_after": 60.0}
    ckpt = rekindle.Checkpointer(root, state, **options)
    ckpt.restore()
    with ckpt.guard() as guard:
        assert agent == "late" or guard.connected(30)
        for step in range(1, _AFTER + 1):
            model(torch.ones(4)).sum().backward()
            optimizer.step()
            ckpt.step(step)
        if rank == 1:
            wait_for((place / "stands").exists)  # rank 0 is in no collective, which would fail
            if agent == "dies too":
                pid = ckpt._session.job_dir.agent()
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                wait_for(lambda: ckpt._session.job_dir.agent() is None)
            os.kill(os.getpid(), signal.SIGKILL)
        (place / "stands").touch()
        threading.Event().wait(120)
    os._exit(0)


@pytest.mark.parametrize("agent", ["late", "dies too"])
def test_a_survivor_is_told_of_a_death_that_no_agent_saw(
    agent: str, root: Path, memory: Path, job: JobDir, go: Path, tmp_path: Path
) -> None:
    """The agent is about to start, or dies just before the rank."""
    survivor, victim = (context.Process(target=_rank, args=(root, memory, rank, agent, tmp_path)) for rank in (0, 1))
    for process in (survivor, victim):
        process.start()
    victim.join(60)
    assert victim.exitcode == -signal.SIGKILL, (tmp_path / "rank-1.log").read_text()
    if agent == "late":
        assert survivor.is_alive() and job.agent() is None
        go.touch()
    survivor.join(100)
    log = (tmp_path / "rank-0.log").read_text()
    if survivor.is_alive():
        survivor.kill()
    assert survivor.exitcode == SURVIVOR_EXIT, log + job.paths.agent_log.read_text()
    assert "fault: rank 1 " in log and f"step {_AFTER} secured" in log
