"""SIGKILL while a snapshot is being copied behind the training's back: what is restored is whole, and of one step."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.memory.job_dir import JobDir
from tests.faults.harness import kill, wait_for
from tests.fork_server import context
from tests.save.overlapped import wait_for_memory

TENSORS, NUMBERS = 24, 1 << 18
"""24 MB of parameters and as much of optimizer state: a copy takes 10 to 50 ms."""


class Count(torch.optim.Optimizer):
    """Adds 1 to every number of the state at each step, so a torn snapshot shows at once."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("count", torch.zeros_like(parameter)).add_(1)
            parameter.add_(1)


def make() -> dict[str, Any]:
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(NUMBERS)) for _ in range(TENSORS)])
    return {"model": model, "optimizer": Count(model.parameters()), "progress": rekindle.Values(step=0)}


def train(root: Path, memory: Path, trace: Path, point: str) -> None:
    from rekindle.common import failpoints

    torch.set_num_threads(1)
    failpoints.arm(point)
    state = make()
    ckpt = rekindle.Checkpointer(root, state, memory=memory, snapshot_every=1, persist_every=10**6, strict=True)
    start = ckpt.restore()
    wait_for_memory(ckpt)
    log = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for step in range(start + 1, 100_000):
        os.write(log, b"held %d\n" % (step - 1))
        state["optimizer"].step()
        state["progress"].step = step
        os.write(log, b"updated %d\n" % step)
        ckpt.step(step)
        os.write(log, b"stepped %d\n" % step)
        time.sleep(0.02)  # training computes, a copy goes on


def whole(root: Path, memory: Path) -> int:
    """Restore, and tell the step, which every single number must agree with."""
    state = make()
    ckpt = rekindle.Checkpointer(root, state, memory=memory, persist_every=10**6)
    step = ckpt.restore()
    assert ckpt.metrics.restored_from in ("memory", "")
    found = {*(value for p in state["model"] for value in p.detach().unique().tolist())}
    found |= {value for s in state["optimizer"].state.values() for value in s["count"].unique().tolist()}
    assert found == {float(step)} and state["progress"].step == step
    del ckpt
    return step


def last(trace: Path, what: str) -> int:
    lines = [line.split() for line in trace.read_text().splitlines()] if trace.exists() else []
    return max((int(words[1]) for words in lines if words[0] == what), default=0)


def test_killed_at_the_point_where_half_is_copied(root: Path, memory: Path, job: JobDir, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    process = context.Process(target=train, args=(root, memory, trace, "save.copying@5"))
    process.start()
    process.join(60)
    assert process.exitcode == -9
    assert last(trace, "stepped") in (4, 5), "the copy goes on after step() has returned"
    assert whole(root, memory) == 4


@pytest.mark.parametrize("kills", [3, pytest.param(12, marks=pytest.mark.campaign(seconds=25))])
def test_killed_at_random(kills: int, root: Path, memory: Path, job: JobDir, tmp_path: Path) -> None:
    """An update begins only once the step before is in memory, so no step is lost that another was built on."""
    luck = random.Random(0)
    copying = 0
    for number in range(40):
        trace = tmp_path / f"trace-{number}"
        process = context.Process(target=train, args=(root, memory, trace, ""))
        process.start()
        wait_for(lambda trace=trace: last(trace, "stepped"), what="a first step")
        goal = last(trace, "stepped") + luck.randrange(1, 6)
        wait_for(lambda trace=trace, goal=goal: last(trace, "stepped") >= goal, what=f"step {goal}")
        time.sleep(luck.random() * 0.01)
        kill(process.pid)
        process.join(30)
        assert process.exitcode == -9
        reached, step = last(trace, "stepped"), whole(root, memory)
        assert last(trace, "updated") - 1 <= step <= last(trace, "updated")
        copying += step < reached
        if copying and number >= kills - 1:
            return
    pytest.fail("no kill met a copy that step() had not waited for")
