"""All defaults in real training: large states have snapshots that the budget pays for, small ones at every step."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rekindle
from tests.fork_server import context
from tests.save.overlapped import wait_for_memory

SMALL, LARGE = 100, 1500
"""Widths of a layer that makes 80 kB and 18 MB of state."""
STEP, BUDGET = 0.02, 0.1


def train(ckpt: rekindle.Checkpointer, model: torch.nn.Linear, optimizer: Any, steps: range) -> list[int]:
    """Returns the steps that had a snapshot. Training needs no core, so a busy machine changes little."""
    saved = []
    for step in steps:
        time.sleep(STEP)
        optimizer.step()
        before = ckpt.metrics.saves
        ckpt.step(step)
        if ckpt.metrics.saves > before:
            saved.append(step)
    return saved


def begin(root: Path, width: int, **options: Any) -> tuple[rekindle.Checkpointer, torch.nn.Linear, Any]:
    model = torch.nn.Linear(width, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    state = {"model": model, "optimizer": optimizer}
    ckpt = rekindle.Checkpointer(root, state, persist_every=10**6, **options)
    ckpt.restore()
    wait_for_memory(ckpt)
    return ckpt, model, optimizer


@pytest.mark.parametrize("overlap", ["auto", pytest.param(False, marks=pytest.mark.campaign(seconds=6))])
def test_a_large_state_has_snapshots_that_the_budget_pays_for(
    overlap: Any, root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt, model, optimizer = begin(root, LARGE, snapshot_budget=BUDGET, overlap=overlap)
    with caplog.at_level(logging.INFO, "rekindle"):
        began = time.perf_counter()
        saved = train(ckpt, model, optimizer, range(1, 201))
        took = time.perf_counter() - began
    stalls = list(ckpt.metrics.stalls)
    assert saved[0] == 1, "the first step has one"
    assert 3 <= len(saved) < 190
    assert sum(stalls) <= 2 * BUDGET * took + 2 * max(stalls), "at each step it would be far more"
    assert ckpt.metrics.snapshot_every >= 1
    assert any("from now on" in record.message for record in caplog.records)
    ckpt.close()


def test_a_small_one_has_a_snapshot_at_every_step(root: Path, memory: Path) -> None:
    ckpt, model, optimizer = begin(root, SMALL)
    assert train(ckpt, model, optimizer, range(1, 71)) == list(range(1, 71)), "no probe is left out"
    assert ckpt.metrics.snapshot_every == 1 and ckpt.metrics.committed_in_step
    ckpt.close()


def test_without_memory_a_time_limits_saves_not_their_price(root: Path, memory: Path) -> None:
    model = torch.nn.Linear(LARGE, LARGE)
    ckpt = rekindle.Checkpointer(root, {"model": model}, memory="/proc/none", persist_seconds=0)
    for step in range(1, 6):
        ckpt.step(step)
    assert ckpt.metrics.direct == 5
    ckpt.close(timeout=60)


def _rank(rank: int, root: Path, memory: Path, rendezvous: str, queue: Any) -> None:
    os.environ["REKINDLE_MEMORY"] = str(memory)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    ckpt, model, optimizer = begin(root, LARGE, snapshot_budget=BUDGET)
    dist.barrier()
    if rank == 1:  # its snapshots cost more: the copy finds the state in its way
        copied = ckpt._saver.memory
        assert copied is not None
        begun = copied.save
        copied.save = lambda *args: (time.sleep(0.02), begun(*args))[1]  # type: ignore[method-assign]
    saved = []
    for step in range(1, 121):
        dist.all_reduce(torch.zeros(1))
        saved += train(ckpt, model, optimizer, range(step, step + 1))
    queue.put((rank, saved, ckpt.metrics.snapshot_every))
    dist.barrier()
    ckpt.close()
    dist.destroy_process_group()


def test_ranks_whose_snapshots_cost_differently_take_those_of_the_same_steps(
    root: Path, memory: Path, tmp_path: Path
) -> None:
    queue = context.Queue()
    rendezvous = str(tmp_path / "rendezvous")
    ranks = [context.Process(target=_rank, args=(rank, root, memory, rendezvous, queue)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = sorted(queue.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
    (_, first, every), (_, second, other) = found
    assert first == second and first[0] == 1 and len(first) < 60
    assert every == other > 5, "0.02 s of a step of 0.02 s, at a tenth of it"
