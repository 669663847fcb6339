"""Copies over the bus, in the order of streams, behind the training's back: only a CUDA device can show them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.devices.cuda import Cuda
from rekindle.memory.job_dir import JobDir, memory_base
from tests.save.overlapped import content, snapshot_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WIDTH = 2048


EACH_STEP: dict[str, Any] = {"snapshot_every": 1, "persist_every": 10**6, "strict": True}


class Training:
    """A network with dropout and batch statistics, on one device or, layer by layer, on all."""

    def __init__(self, spread: bool = False) -> None:
        torch.manual_seed(3)
        self.devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count() if spread else 1)]
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Dropout(0.1)).to(d)
            for d in self.devices * 2
        )
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), lr=1e-3, foreach=True)

    @property
    def state(self) -> dict[str, Any]:
        return {"layers": self.layers, "optimizer": self.optimizer}

    def backward(self) -> None:
        x = torch.randn(64, WIDTH, device=self.devices[0])
        for layer, device in zip(self.layers, self.devices * 2, strict=True):
            x = x + layer(x.to(device)).to(x.device)
        self.optimizer.zero_grad(set_to_none=False)
        x.square().mean().backward()

    def update(self) -> None:
        self.backward()
        self.optimizer.step()


def run(
    root: Path, memory: Path, overlap: bool, spread: bool = False, stream: torch.cuda.Stream | None = None
) -> list[Any]:
    """What the snapshots of 30 steps hold: every other step of 60 is copied beside the update that follows."""
    training = Training(spread)
    ckpt = rekindle.Checkpointer(root, training.state, overlap=overlap, **EACH_STEP)
    job = JobDir.of(root, memory_base(memory))
    ckpt.restore()
    assert ckpt._saver.memory.slots.wait_made(60.0)
    found = []
    with torch.cuda.stream(stream):
        for step in range(2, 61, 2):
            training.update()
            ckpt.step(step - 1)
            training.update()
            ckpt.save(step, wait="memory")
            found.append(content(snapshot_of(job, step)))
    ckpt.close()
    return found


@pytest.mark.parametrize("how", ["one stream", "a stream of its own", "all devices"])
def test_overlapped_snapshots_equal_those_copied_at_once(how: str, root: Path, memory: Path) -> None:
    stream = torch.cuda.Stream() if how == "a stream of its own" else None
    at_once = run(root / "at-once", memory, False, how == "all devices", stream)
    assert run(root / "overlapped", memory, True, how == "all devices", stream) == at_once
    assert len({shard for shard, _, _ in at_once}) == 30


def test_replayed_graphs_are_fenced_by_hand(root: Path, memory: Path) -> None:
    """Off the default stream, where graphs are captured, and without a hook, which a replay doesn't call."""
    found = {}
    for overlap in (False, True):
        torch.manual_seed(1)
        model = torch.nn.Linear(WIDTH, WIDTH, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
        x = torch.randn(64, WIDTH, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        torch.cuda.current_stream().wait_stream(stream)
        where = root / str(overlap)
        ckpt = rekindle.Checkpointer(where, {"model": model, "optimizer": optimizer}, overlap=overlap, **EACH_STEP)
        job = JobDir.of(where, memory_base(memory))
        ckpt.restore()
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad()
        with torch.cuda.graph(graph, stream=stream):
            model(x).square().mean().backward()
            optimizer.step()
        found[overlap] = []
        with torch.cuda.stream(stream):
            for step in range(2, 21, 2):
                with ckpt.updating():
                    graph.replay()
                ckpt.step(step - 1)
                with ckpt.updating():
                    graph.replay()
                ckpt.save(step, wait="memory")
                found[overlap].append(content(snapshot_of(job, step)))
        ckpt.close()
    assert found[True] == found[False] and len({shard for shard, _, _ in found[True]}) == 10


def test_slots_are_page_locked(root: Path, memory: Path) -> None:
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state)
    ckpt.restore()
    training.update()
    ckpt.save(1, wait="memory")
    pending = ckpt._saver.memory.pending
    assert torch.frombuffer(pending.slot.map, dtype=torch.uint8).is_pinned()
    ckpt.close()


def test_memory_that_cannot_be_page_locked_is_used_all_the_same(
    root: Path, memory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = run(root / "locked", memory, True)
    register = Cuda.register

    def refuse(self: Cuda, address: int, nbytes: int) -> bool:
        register(self, address, nbytes)
        try:
            return register(self, address, nbytes)  # it is locked already, which CUDA refuses
        finally:
            self.unregister(address)

    monkeypatch.setattr(Cuda, "register", refuse)
    monkeypatch.setattr("rekindle.devices.page_lock._warned", False)
    with caplog.at_level(logging.WARNING, "rekindle"):
        assert run(root / "refused", memory, True) == locked
    assert "can't be page-locked (CUDA error" in caplog.text


@pytest.mark.parametrize("place", ["memory", "storage"])
def test_restore(place: str, root: Path, memory: Path) -> None:
    training = Training()
    ckpt = rekindle.Checkpointer(root, training.state)
    ckpt.restore()
    training.update()
    ckpt.save(1, wait="durable")
    expected = [p.detach().clone() for p in training.layers.parameters()]
    if place == "storage":
        ckpt.close()
    del ckpt
    again = Training()
    ckpt = rekindle.Checkpointer(root, again.state)
    assert ckpt.restore() == 1 and ckpt.metrics.restored_from == place
    for p, q in zip(expected, again.layers.parameters(), strict=True):
        assert p.device == q.device and torch.equal(p, q)
    for p, q in zip(training.layers.parameters(), again.layers.parameters(), strict=True):
        for key, value in training.optimizer.state[p].items():
            assert torch.equal(value, again.optimizer.state[q][key])
    ckpt.close()
