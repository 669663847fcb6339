"""Nodes that restore from each other's memory: memory stores on file systems of their own, with an agent each."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
import rekindle.session.nodes as meeting_of_nodes
from rekindle.memory.incidents import read_start
from rekindle.memory.job_dir import JobDir
from rekindle.memory.local_state import read_local_files
from rekindle.restore.restore import restore
from tests.integrations.dcp.ranks import attempt, ranks

STEPS = 3


def _job(memory: Path) -> JobDir:
    (directory,) = memory.glob("rekindle-*/*/")
    return JobDir(directory)


def _train(
    rank: int, root: Path, memories: list[Path], steps: int, lost_after: int = 0, lost: int = 1
) -> dict[str, Any]:
    """Trains one replica of two, which has a tensor and a random generator of its own, and says what it came to.

    It does not close, so memory has the newest step, as after a fault. After step ``lost_after`` the node of rank
    ``lost`` is lost, but for its memory.
    """
    _be_patient()
    torch.manual_seed(rank)
    own = rekindle.Values(weights=torch.randn(1000))
    linear = torch.nn.Linear(64, 64)
    model = torch.nn.parallel.DistributedDataParallel(linear)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = {"model": linear, "optimizer": optimizer, "own": own}
    ckpt = rekindle.Checkpointer(root, state, memory=memories[rank], persist_every=10**6, peer_every=None)
    begun = ckpt.restore()
    came_to = {begun: _digest(linear, optimizer, own)}
    with ckpt.guard(watchdog=False) if lost_after else nullcontext():
        for n in range(begun + 1, steps + 1):
            model(torch.rand(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            own.weights += torch.rand(1000)
            came_to[n] = _digest(linear, optimizer, own)
            (root.parent / f"rank-{rank}-step-{n}").write_text(came_to[n])
            ckpt.step(n)
            if n == lost_after and rank == lost:
                _lose_node(memories, rank, n)
    return {"begun": begun, "from": ckpt.metrics.restored_from, "came to": came_to}


def _be_patient() -> None:
    """Gives agents time to start on a busy machine. A job goes on without them sooner."""
    if "REKINDLE_ADDRESS" not in os.environ:
        meeting_of_nodes._ANSWERS_WITHIN = 60.0


def _digest(linear: torch.nn.Module, optimizer: torch.optim.Optimizer, own: rekindle.Values) -> str:
    """Names all bits of the state, the random generator's among them."""
    moments = [one[name] for one in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    tensors = [*linear.state_dict().values(), *moments, own.weights, torch.get_rng_state()]
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def _lose_node(memories: list[Path], rank: int, step: int) -> None:
    """Ends a rank and its agent, once the other node has what only this rank had."""
    here, partner = _job(memories[rank]), _job(memories[1 - rank])
    until = time.monotonic() + 60
    while (kept := read_local_files(partner.others, rank)) is None or (kept.newest or (0, 0))[1] < step:
        assert time.monotonic() < until, "the partner has not been sent the local state"
        time.sleep(0.01)
    agent = here.agent()
    assert agent is not None
    os.kill(agent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _lose_memory(memory: Path) -> None:
    """Removes the memory of a node whose processes have ended."""
    shutil.rmtree(_job(memory).path.parent)


def test_ranks_that_have_changed_nodes_read_their_state_from_there(root: Path, memories: list[Path]) -> None:
    trained = ranks(2, _train, root, memories, STEPS)
    swapped = ranks(2, _train, root, memories[::-1], STEPS)
    assert [(one["begun"], one["from"]) for one in swapped] == [(STEPS, "peer")] * 2
    assert [one["came to"][STEPS] for one in swapped] == [one["came to"][STEPS] for one in trained]
    hosts = {record.host for memory in memories if (record := read_start(_job(memory))) is not None}
    assert len(hosts) == 2 and all(hosts), "nodes of one host name have records of incidents of their own"


def test_a_lost_node_costs_at_most_one_step_though_nothing_was_on_storage(root: Path, memories: list[Path]) -> None:
    assert attempt(2, _train, root, memories, STEPS + 2, STEPS)[1][1] == -signal.SIGKILL
    _lose_memory(memories[1])
    again = ranks(2, _train, root, memories, STEPS + 2)
    assert [one["begun"] for one in again] in ([STEPS] * 2, [STEPS - 1] * 2)
    assert again[1]["from"] == "peer"
    for rank, one in enumerate(again):
        assert one["came to"][one["begun"]] == (root.parent / f"rank-{rank}-step-{one['begun']}").read_text()


@pytest.mark.campaign
def test_a_job_that_goes_on_with_one_node_of_two_loses_at_most_one_step(root: Path, memories: list[Path]) -> None:
    """Rank 0 begins where rank 1 was: there lies what only the lost rank 0 had."""
    assert attempt(2, _train, root, memories, STEPS + 2, STEPS, 0)[1][0] == -signal.SIGKILL
    _lose_memory(memories[0])
    (again,) = ranks(1, _train, root, memories[1:], STEPS + 2)
    assert again["begun"] in (STEPS, STEPS - 1) and again["from"] == "memory"
    assert again["came to"][again["begun"]] == (root.parent / f"rank-0-step-{again['begun']}").read_text()


@pytest.mark.campaign
def test_a_rank_on_a_new_node_reads_its_state_from_the_one_that_it_was_on(root: Path, memories: list[Path]) -> None:
    """The agent there has begun in a start on one node, where nobody told it to listen."""
    one, other = memories
    trained = ranks(2, _train, root, [one, one], STEPS)
    moved = ranks(2, _train, root, [one, other], STEPS)
    assert [(one["begun"], one["from"]) for one in moved] == [(STEPS, "memory"), (STEPS, "peer")]
    assert [one["came to"][STEPS] for one in moved] == [one["came to"][STEPS] for one in trained]


def _read(rank: int, root: Path, memories: list[Path]) -> tuple[int, int, float]:
    """Saves what all ranks have alike, or restores it. Returns the bytes that it wanted, those that it read, a sum."""
    _be_patient()
    torch.manual_seed(0)
    model = torch.nn.Linear(2500, 2500)  # 25 MB
    ckpt = rekindle.Checkpointer(root, {"model": model}, memory=memories[rank], persist_every=10**6, peer_every=None)
    session = ckpt._session
    done, _ = restore(
        ckpt._group, ckpt._capture.state, session.job, session.store, None, allow_pickle=False, nodes=session.nodes
    )
    if done is not None:
        return done.nbytes, done.read, float(model.bias.sum())
    with torch.no_grad():
        model.bias.fill_(3.0)
    ckpt.save(1, wait="memory")
    return 0, 0, 0.0


@pytest.mark.campaign(seconds=20)
def test_ranks_of_a_new_node_read_once_what_they_have_in_common(root: Path, memories: list[Path]) -> None:
    one, other = memories
    ranks(3, _read, root, [one] * 3)
    (near, *_), *far = ranks(3, _read, root, [one, other, other])
    assert all(value == 7500.0 for _, _, value in far)
    assert near < sum(read for _, read, _ in far) < 1.2 * near


@pytest.mark.campaign(seconds=25)
def test_without_a_mesh_the_job_goes_on_as_if_there_were_none(
    root: Path, memories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REKINDLE_ADDRESS", "192.0.2.1")  # of no host, so that nobody can listen there
    trained = ranks(2, _train, root, memories, STEPS)
    again = ranks(2, _train, root, memories, STEPS)
    assert [(one["begun"], one["from"]) for one in again] == [(STEPS, "memory")] * 2
    assert [one["came to"][STEPS] for one in again] == [one["came to"][STEPS] for one in trained]
    assert not any(_job(memory).paths.nodes.exists() for memory in memories)
