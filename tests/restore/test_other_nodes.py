"""Nodes that restore from each other's memory: memory stores on file systems of their own, with an agent each."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.memory.job_dir import JobDir
from tests.faults.harness import end_agent
from tests.integrations.dcp.ranks import ranks

STEPS = 3


@pytest.fixture
def memories(small_tmpfs: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The memory of two nodes on this host."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    places = [small_tmpfs(64 << 20), small_tmpfs(64 << 20)]
    yield places
    for place in places:
        for directory in place.glob("rekindle-*/*"):
            end_agent(JobDir(directory))


def _train(rank: int, root: Path, memories: list[Path], steps: int) -> dict[str, Any]:
    """Trains one replica of two, which has a tensor and a random generator of its own, and says what it came to.

    It does not close, so memory has the newest step, as after a fault.
    """
    torch.manual_seed(rank)
    linear = torch.nn.Linear(64, 64)
    own = rekindle.Values(weights=torch.randn(1000))
    model = torch.nn.parallel.DistributedDataParallel(linear)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer, "own": own}
    ckpt = rekindle.Checkpointer(root, state, memory=memories[rank], persist_every=10**6)
    begun = ckpt.restore()
    for n in range(begun + 1, steps + 1):
        model(torch.rand(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        own.weights += torch.rand(1000)
        ckpt.step(n)
    ckpt.save(steps, wait="memory") if begun < steps else None
    tensors = [*model.state_dict().values(), own.weights, *(s["exp_avg"] for s in optimizer.state.values())]
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()
    return {"begun": begun, "from": ckpt.metrics.restored_from, "digest": digest, "next": float(torch.rand(1))}


def _came_to(results: list[dict[str, Any]]) -> list[tuple[str, float]]:
    return [(one["digest"], one["next"]) for one in results]


def test_ranks_that_have_changed_nodes_read_their_state_from_there(root: Path, memories: list[Path]) -> None:
    trained = ranks(2, _train, root, memories, STEPS)
    swapped = ranks(2, _train, root, memories[::-1], STEPS)
    assert [(one["begun"], one["from"]) for one in swapped] == [(STEPS, "peer")] * 2
    assert _came_to(swapped) == _came_to(trained)


@pytest.mark.campaign(seconds=15)
def test_a_rank_on_a_new_node_reads_its_state_from_the_one_that_it_was_on(root: Path, memories: list[Path]) -> None:
    """The agent there has begun in a start on one node, where nobody told it to listen."""
    one, other = memories
    trained = ranks(2, _train, root, [one, one], STEPS)
    moved = ranks(2, _train, root, [one, other], STEPS)
    assert [(one["begun"], one["from"]) for one in moved] == [(STEPS, "memory"), (STEPS, "peer")]
    assert _came_to(moved) == _came_to(trained)
    trained, moved = (ranks(2, _train, root, places, 2 * STEPS) for places in ([one, other], [other, one]))
    assert [(one["begun"], one["from"]) for one in trained] == [(STEPS, "memory"), (STEPS, "peer")]
    assert [one["begun"] for one in moved] == [2 * STEPS] * 2 and _came_to(moved) == _came_to(trained)


@pytest.mark.campaign(seconds=25)
def test_without_a_mesh_the_job_goes_on_as_if_there_were_none(
    root: Path, memories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REKINDLE_ADDRESS", "192.0.2.1")  # of no host, so that nobody can listen there
    trained = ranks(2, _train, root, memories, STEPS)
    again = ranks(2, _train, root, memories, STEPS)
    assert [(one["begun"], one["from"]) for one in again] == [(STEPS, "memory")] * 2
    assert _came_to(again) == _came_to(trained)
    assert not any(os.path.exists(directory / "nodes.json") for place in memories for directory in place.glob("*/*"))
