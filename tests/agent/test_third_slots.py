"""A drain begins when no rank loses snapshots by it: when each has a third slot, has said no, or after a while."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import rekindle
from rekindle.agent import third_slots
from rekindle.agent.drain import Drainer
from rekindle.format.lineage import ShardId
from rekindle.memory import pages
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.slots import Slots
from rekindle.memory.thirds import Thirds
from rekindle.storage.posix import PosixStore
from tests.conftest import commit, make_shard
from tests.memory.saved import FIRST, alone
from tests.save.overlapped import wait_for_memory

CONTENT = pages.AT_ONCE
SECONDS = 60.0


class Node:
    """A rank that trains in this process, and the drain of its node."""

    def __init__(self, root: Path, content: int = CONTENT) -> None:
        self.root = root
        self.job = JobDir.of(root, memory_base())
        self.job.create()
        self.job.write_job(JobInfo(str(root), [0], 1, 2, None, 600.0, start=FIRST.id))
        self.lock = self.job.lock_rank(0, 5.0)
        self.slots, self.notes, self.drainer = alone(self.job), Thirds(self.job.paths), Drainer(self.job)
        for step in (1, 2):
            receipt, data = make_shard(ShardId(step, 0, 1, FIRST), {"x": bytes(content)})
            commit(self.slots, receipt, data)
        self.notes.write_made(FIRST.id)

    def durable(self) -> list[int]:
        return [entry.stamp.step for entry in PosixStore(self.root).published()]

    def close(self) -> None:
        self.slots.close()
        self.lock.release()


@pytest.fixture
def node(root: Path, memory: Path) -> Iterator[Node]:
    node = Node(root)
    yield node
    node.close()


def test_it_begins_when_there_is_a_third_slot(node: Node) -> None:
    assert not node.drainer.tick() and node.notes.are_asked()
    assert not node.drainer.tick(), "nobody has made it"
    node.slots.make_third(FIRST.id)
    assert node.slots.wait_made(SECONDS)
    assert not node.drainer.tick(), "its pages may still be locked"
    assert node.drainer.tick() and node.durable() == [2]


def test_a_slot_that_is_being_made_is_none_yet(node: Node) -> None:
    assert not node.drainer.tick()
    half = node.job.paths.slots / "rank-00000-1.slot"
    with half.open("wb") as file:
        file.truncate(CONTENT)
    for _ in range(3):
        assert not node.drainer.tick()
    assert not node.durable()


@pytest.mark.parametrize("why", ["there is no room", "somebody waits", "nobody trains", "the ranks make none"])
def test_it_begins_at_once_where_waiting_has_no_use(why: str, node: Node) -> None:
    if why == "there is no room":
        assert not node.drainer.tick()
        node.slots.limit = 2 * CONTENT
        node.slots.make_third(FIRST.id)
        assert not node.drainer.tick()
    elif why == "somebody waits":
        node.drainer.hurry()
    elif why == "nobody trains":
        node.lock.release()
    else:
        node.notes.write_made("b" * 16)
    assert node.drainer.tick() and node.durable() == [2]


def test_it_begins_at_once_with_small_snapshots(root: Path, memory: Path) -> None:
    node = Node(root, 50_000)
    assert node.drainer.tick() and node.durable() == [2]
    node.close()


def test_it_waits_for_a_while_only(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may be stopped, or in the middle of a long step."""
    monkeypatch.setattr(third_slots, "_WAITS", 0.5)
    began = time.monotonic()
    while not node.drainer.tick():
        assert time.monotonic() < began + SECONDS
        time.sleep(0.01)
    assert time.monotonic() >= began + 0.5 and node.durable() == [2]


def test_no_step_is_left_out_while_third_slots_come_and_go(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes as long to make as many steps, and is dropped as soon as a drain has ended."""
    monkeypatch.setattr("rekindle.memory.slots._IDLE", 1)
    monkeypatch.setattr("rekindle.memory.slots._MOST_DOUBLED", 0)
    made: list[Slots] = []
    make, make_third = pages._Making._make, Slots.make_third

    def slow(making: pages._Making, start: int, stop: int) -> int:
        time.sleep(0.3)
        return make(making, start, stop)

    def count(slots: Slots, start: str) -> None:
        before = len(slots.slots)
        make_third(slots, start)
        made.extend([slots] * (len(slots.slots) - before))

    model = torch.nn.Linear(2100, 2100, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    ckpt = rekindle.Checkpointer(root, state, strict=True, snapshot_every=1, persist_every=None, persist_seconds=0.2)
    ckpt.restore()
    wait_for_memory(ckpt)
    monkeypatch.setattr(pages._Making, "_make", slow)
    monkeypatch.setattr(Slots, "make_third", count)
    step, until = 0, time.monotonic() + SECONDS
    while len(made) < 2 and time.monotonic() < until:
        step += 1
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        ckpt.step(step)
        time.sleep(0.02)
    assert len(made) >= 2, "drains went on, and each needed one anew"
    assert ckpt.metrics.left_out == 0 and ckpt.metrics.failed == 0
    ckpt.close()
