"""Two nodes with a rank each, one of which is told to go: both secure one step, though they were not at one."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import torch

import rekindle
from rekindle.agent.http import send_request
from rekindle.errors import AgentError
from rekindle.memory.job_dir import JobDir
from rekindle.storage.posix import PosixStore
from tests.faults.harness import wait_for
from tests.faults.peer import steps_of
from tests.integrations.dcp.ranks import attempt, ranks

STEPS, STRUCK = 7, 5


def _hears_the_other(job: JobDir) -> bool:
    with suppress(AgentError):
        return [node["state"] for node in send_request(job.paths.agent_socket, "GET", "/status")["nodes"]].count(
            "there"
        ) == 1
    return False


def _train(rank: int, root: Path, memories: list[Path], passed: Path, struck: int = 0) -> tuple[int, list[float]]:
    """Trains a part of the state that no other rank has, and takes no snapshots.

    Rank 1 is told to go once it has the gradients of step ``struck`` and rank 0 has completed that step.
    """
    torch.manual_seed(rank)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    ckpt = rekindle.Checkpointer(root, state, memory=memories[rank], persist_every=10**6, snapshot_every=10**9)
    begun = ckpt.restore()
    with ckpt.guard(watchdog=False) as guard:
        wait_for(lambda: _hears_the_other(ckpt._session.job_dir), what="the other node")
        for step in range(begun + 1, STEPS + 1):
            loss = model(torch.full((8,), float(step))).square().mean()
            torch.distributed.all_reduce(loss.detach())
            loss.backward()
            if rank == 1 and step == struck:
                wait_for(passed.exists, what="rank 0 to be past the step")
                os.kill(os.getpid(), signal.SIGTERM)
                wait_for(lambda: guard._gate._page.secured == struck - 1, what="the step before to be secured")
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step(step)
            if rank == 0 and step == struck:
                passed.touch()
                time.sleep(60.0)  # as in a collective of the next step
    return begun, [float(tensor.double().sum()) for tensor in model.parameters()]


def test_ranks_of_several_nodes_secure_one_step_when_one_is_told_to_go(
    root: Path, memories: list[Path], tmp_path: Path
) -> None:
    """Storage would have no complete step else, and nodes that all go take their memory along."""
    passed = tmp_path / "passed"
    _, codes = attempt(2, _train, root, memories, passed, STRUCK)
    assert codes[1] == 128 + signal.SIGTERM and codes[0] not in (0, -signal.SIGKILL)
    (job,) = map(JobDir, memories[1].glob("rekindle-*/*/"))
    assert steps_of(job, 1) == [STRUCK - 1, STRUCK], "it was behind when it was told to go"
    wait_for(lambda: [entry.stamp.step for entry in PosixStore(root).published()] == [STRUCK], what="the step")
    again = ranks(2, _train, root, memories, passed)
    unbroken = ranks(2, _train, tmp_path / "unbroken", memories, passed)
    assert [begun for begun, _ in again] == [STRUCK, STRUCK]
    assert [bits for _, bits in again] == [bits for _, bits in unbroken]
