"""Two nodes with a rank each, of which one is killed: only the other node has replicas of what it held."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.storage.posix import PosixStore
from tests.faults.harness import end_agent, wait_for
from tests.integrations.dcp.ranks import attempt, ranks

STEPS, STRUCK = 7, 5


def _train(rank: int, root: Path, memories: list[Path], optimizer: str, moment: str = "") -> tuple[int, str, str]:
    """Trains a replica with dropout, a random generator and an order of data of its own, and takes no snapshots.

    Rank 1 is killed at ``moment``: once step ``STRUCK`` is complete; or "late", when rank 0 takes its time to secure
    it; or in the middle of its update, and its agent with it, which would rebuild the step before a restart does.
    """
    torch.manual_seed(rank)
    order = rekindle.Values(seen=0.0)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 1))
    )
    made = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer](model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": made, "order": order}
    ckpt = rekindle.Checkpointer(root, state, memory=memories[rank], persist_every=10**6, snapshot_every=10**9)
    begun, step = ckpt.restore(), 0

    def strike(*_: Any) -> None:
        if rank == 1 and step == STRUCK and moment == "update":
            end_agent(ckpt._session.job_dir)
            os.kill(os.getpid(), signal.SIGKILL)

    def take_time(step: int) -> None:
        if rank == 0 and moment == "late":
            time.sleep(1.5)

    made.register_step_pre_hook(strike)
    with ckpt.guard(fence=moment == "update", watchdog=False, on_clean=take_time):
        for step in range(begun + 1, STEPS + 1):
            data = torch.rand(8, 64)
            order.seen += float(data.sum())
            model(data).square().mean().backward()
            made.step()
            made.zero_grad()
            ckpt.step(step)
            if rank == 1 and step == STRUCK and moment in ("step", "late"):
                os.kill(os.getpid(), signal.SIGKILL)
    moments = [tensor for one in made.state.values() for tensor in one.values()]
    bits = [*model.state_dict().values(), *moments, torch.get_rng_state(), torch.tensor(order.seen)]
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in bits)).hexdigest()
    return begun, ckpt.metrics.restored_from, digest


@pytest.mark.campaign(seconds=25)
@pytest.mark.parametrize(("optimizer", "moment"), [("adam", "step"), ("sgd", "step"), ("adam", "update")])
def test_a_killed_rank_loses_no_step_though_only_another_node_has_replicas(
    optimizer: str, moment: str, root: Path, memories: list[Path], tmp_path: Path
) -> None:
    _, codes = attempt(2, _train, root, memories, optimizer, moment)
    assert codes[1] == -signal.SIGKILL
    again = ranks(2, _train, root, memories, optimizer)
    unbroken = ranks(2, _train, tmp_path / "unbroken", memories, optimizer)
    assert [begun for begun, _, _ in again] == [STRUCK, STRUCK]
    # An agent that lives may have rebuilt the part before the restart asks for it.
    assert again[1][1] == "peer" or (again[1][1] == "memory" and moment == "step")
    assert [digest for *_, digest in again] == [digest for *_, digest in unbroken]


@pytest.mark.campaign
def test_the_step_of_a_killed_rank_reaches_storage_though_the_job_does_not_start_again(
    root: Path, memories: list[Path]
) -> None:
    """Its agent rebuilds it as soon as the other node's rank has secured the replicas."""
    attempt(2, _train, root, memories, "adam", "late")
    wait_for(lambda: [entry.stamp.step for entry in PosixStore(root).published()] == [STRUCK])
