"""Two nodes of one job: two memory directories on this host, and one root. Each node's agent drains its own part."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest

import rekindle
from rekindle.agent import unfinished
from rekindle.agent.drain import Drainer
from rekindle.cli.operations import stop
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir
from rekindle.memory.notes import Common
from rekindle.memory.slots import Slots
from rekindle.storage.catalog import find_copies
from rekindle.storage.posix import PosixStore
from rekindle.storage.verify import verify
from rekindle.testing import make_shard
from tests.conftest import commit
from tests.peers.peer import put

START = Incarnation(1, "a" * 16)
MISSING = r"step {} is not whole on storage: .* lacks the shard of rank\(s\) {}, and another node has to write it"


class Node:
    """Has one rank."""

    def __init__(self, memory: Path, root: Path, rank: int, stack: ExitStack, count: int = 2) -> None:
        self.job, self.rank, self.count = JobDir(memory / f"node-{rank}" / "job"), rank, count
        self.job.create()
        self.job.write_job(JobInfo(str(root), [rank], count, count, None, 600.0))
        self.slots = Slots(self.job, rank, count, [rank])
        stack.callback(self.slots.close)
        self.drainer = Drainer(self.job)

    def save(self, step: int, *, pinned: bool = False) -> None:
        stamp = ShardId(step, self.rank, self.count, START, pinned=pinned)
        receipt, data = make_shard(stamp, {f"x{self.rank}": b"%d" % step})
        commit(self.slots, receipt, data)

    def drain(self, step: int, *, pinned: bool = False) -> bool:
        self.save(step, pinned=pinned)
        return self.drainer.tick()

    def stop(self) -> None:
        stop(self.job, 1.0, lambda progress: None)


@pytest.fixture
def three_nodes(memory: Path, root: Path) -> Iterator[list[Node]]:
    """Nodes of one rank each."""
    for rank in range(3):
        (memory / f"node-{rank}").mkdir(0o700)
    with ExitStack() as stack:
        yield [Node(memory, root, rank, stack, 3) for rank in range(3)]


@pytest.fixture
def nodes(memory: Path, root: Path) -> Iterator[tuple[Node, Node]]:
    (memory / "node-0").mkdir(0o700)
    (memory / "node-1").mkdir(0o700)
    with ExitStack() as stack:
        yield Node(memory, root, 0, stack), Node(memory, root, 1, stack)


def partial(root: Path) -> list[int]:
    return sorted(int(path.name[5:15]) for path in root.glob("*.partial"))


def test_a_step_of_which_another_node_lacks_its_part_is_not_given_up(nodes: tuple[Node, Node], root: Path) -> None:
    one, other = nodes
    assert not one.drain(7) and partial(root) == [7]
    assert one.drainer.pending() == 7, "the agent stays, and keeps the memory"
    with pytest.raises(rekindle.NotDurableError, match=MISSING.format(7, 1)):
        one.stop()
    assert {stamp.step for stamp, _ in one.job.snapshots.shard_ids()} == {7}
    assert other.drain(7)
    one.stop()
    other.stop()
    assert not one.job.path.exists() and not other.job.path.exists()
    assert [entry.stamp.step for entry in PosixStore(root).published()] == [7]


def test_what_nodes_have_of_ranks_that_have_changed_places_reaches_storage(
    nodes: tuple[Node, Node], root: Path
) -> None:
    """The job may have gone on from it, and come to no newer step before it is stopped."""
    one, other = nodes
    for node in nodes:
        node.save(7)
        node.job.write_job(JobInfo(str(root), [1 - node.rank], 2, 2, None, 600.0))
    assert not one.drainer.tick() and one.drainer.pending() == 7
    assert other.drainer.tick()
    assert [entry.stamp.step for entry in PosixStore(root).published()] == [7]


def test_a_rank_that_is_told_to_go_learns_that_its_node_has_brought_its_part(nodes: tuple[Node, Node]) -> None:
    one, _ = nodes
    one.drain(7)
    one.job.notes.write_agent_status(asdict(one.drainer.progress))
    assert one.job.notes.is_brought(7, START.id) and one.job.notes.is_brought(6, START.id)
    assert not one.job.notes.is_brought(8, START.id) and not one.job.notes.is_brought(7, "b" * 16)
    one.drain(6)
    assert one.drainer.progress.brought == (7, START.id), "an older one that comes last takes nothing back"


def test_what_lacks_is_told_after_a_while_and_forgotten_when_it_comes(
    nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = nodes
    one.drain(3)
    one.drainer.tick()
    assert one.drainer.progress.waits is None, "other nodes may be slower"
    monkeypatch.setattr(unfinished, "_OVERDUE", 0.0)
    one.drainer._unfinished._ask_at = 0.0
    one.drainer.tick()
    assert "lacks the shard of rank(s) 1" in str(one.drainer.progress.waits)
    other.drain(3)
    one.drainer._unfinished._ask_at = 0.0
    one.drainer.tick()
    assert one.drainer.progress.waits is None and one.drainer.progress.durable == 3


def test_a_part_that_another_node_has_overtaken_is_no_missing_mount(
    nodes: tuple[Node, Node], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = nodes
    publish = PosixStore.publish

    def late(store: PosixStore, stamp: ShardId, before: Callable[[], object]) -> bool:
        """A newer step becomes durable just before, from another agent of this node, and its clean-up takes this one's
        part."""
        monkeypatch.setattr(PosixStore, "publish", publish)
        one.save(2)
        other.save(2)
        assert not other.drainer.tick() and Drainer(one.job).tick() and partial(root) == []
        return store.publish(stamp, before)

    monkeypatch.setattr(PosixStore, "publish", late)
    assert not one.drain(1) and one.drainer.progress.error is None
    assert not one.drainer.tick() and one.drainer.pending() is None and one.drainer.progress.error is None


def test_a_part_that_is_gone_though_nothing_newer_is_durable_is_written_again(
    nodes: tuple[Node, Node], root: Path
) -> None:
    """As when the disk comes back as it was before."""
    one, other = nodes
    one.drain(1)
    shutil.rmtree(root)
    one.drainer._unfinished._ask_at = 0.0
    one.drainer.tick()
    assert one.drainer.pending() == 1 and partial(root) == [1]
    assert other.drain(1)


def test_parts_that_nobody_completes_stay_within_bounds(nodes: tuple[Node, Node], root: Path) -> None:
    one, other = nodes
    for step in range(1, 11):
        one.drain(step)
        if step == 4:
            other.save(4)
            assert other.drainer.tick() is True, "within the bound it becomes durable"
    assert partial(root) == [8, 9, 10] and one.drainer.pending() == 10
    assert other.drain(10) and partial(root) == []


def test_parts_that_one_of_three_nodes_never_completes_stay_within_bounds(three_nodes: list[Node], root: Path) -> None:
    one, other, third = three_nodes
    for step in range(1, 11):
        assert not one.drain(step) and not other.drain(step)
        assert len(partial(root)) <= 4, "one writes the newest step before the other"
    assert partial(root) == [8, 9, 10] and one.drainer.pending() == other.drainer.pending() == 10
    assert third.drain(10) and partial(root) == [] and durable(root) == [10]


def test_a_part_of_a_step_that_is_to_be_pinned_waits_for_a_node_that_is_late(
    three_nodes: list[Node], root: Path
) -> None:
    one, other, third = three_nodes
    for step in range(1, 10):
        one.drain(step, pinned=step == 1)
        other.drain(step, pinned=step == 1)
    assert partial(root) == [1, 7, 8, 9]
    assert third.drain(1, pinned=True) and durable(root) == [1]


def test_a_part_that_another_node_has_begun_is_not_withdrawn(nodes: tuple[Node, Node], root: Path) -> None:
    one, other = nodes
    one.drain(1)
    (root / f"step-0000000001.{START.id}.partial" / ".shard-00001-of-00002.safetensors.tmp").write_bytes(b"half")
    for step in range(2, 9):
        one.drain(step)
    assert partial(root) == [1, 6, 7, 8]
    assert other.drain(1), "however slow it is"
    assert partial(root) == [6, 7, 8]


# -- a node that never comes back --------------------------------------------------------------------------------------


def keep_copy(node: Node, step: int, rank: int) -> None:
    """Leaves a copy of another node's snapshot in the memory of ``node``."""
    node.job.copies.create()
    put(node.job.copies, step, {f"x{rank}": b"%d" % step}, rank, 2)


def survivor(node: Node, lost: list[int]) -> Node:
    node.drainer = Drainer(node.job, lost_ranks=lambda: lost)
    return node


def drain_all(node: Node, times: int = 12) -> None:
    for _ in range(times):
        node.drainer.tick()


def durable(root: Path) -> list[int]:
    return [entry.stamp.step for entry in PosixStore(root).published()]


def test_the_newest_step_with_copies_gets_to_storage_when_a_node_is_lost_for_good(
    nodes: tuple[Node, Node], root: Path
) -> None:
    lost: list[int] = []
    one = survivor(nodes[0], lost)
    for step in (5, 7):
        keep_copy(one, step, 1)
        one.save(step)
    one.save(9)
    drain_all(one)
    assert durable(root) == [] and 9 in partial(root), "the other node may still come"
    lost.append(1)
    drain_all(one)
    assert durable(root) == [7]
    assert verify(find_copies(None, PosixStore(root))[0]) == []
    assert one.drainer.pending() == 9, "should the node come back"


def test_nobody_stands_in_for_a_lost_node_while_ranks_train(nodes: tuple[Node, Node], root: Path) -> None:
    one = survivor(nodes[0], [1])
    lock = one.job.lock_rank(0, 0.0)
    try:
        for step in (5, 7):
            keep_copy(one, step, 1)
            one.drain(step)
        drain_all(one)
        assert durable(root) == [] and partial(root) == [5, 7]
    finally:
        lock.release()
    drain_all(one)
    assert durable(root) == [7], "the newest one, after which nobody needs the other"


@pytest.mark.parametrize("moved", [False, True])
def test_a_former_starts_step_is_completed_unless_ranks_have_changed_places(
    nodes: tuple[Node, Node], root: Path, *, moved: bool
) -> None:
    """Then nobody knows whose part the copies are. The step stays in memory for the next start."""
    one = survivor(nodes[0], [0 if moved else 1])
    keep_copy(one, 7, 1)
    one.save(7)
    one.job.write_job(JobInfo(str(root), [1 if moved else 0], 2, 2, None, 600.0, start="b" * 16))
    drain_all(one)
    assert durable(root) == ([] if moved else [7]) and one.drainer.pending() == (7 if moved else None)


def test_a_damaged_copy_makes_no_checkpoint_and_an_older_one_is_taken(nodes: tuple[Node, Node], root: Path) -> None:
    one = survivor(nodes[0], [1])
    for step in (5, 7):
        keep_copy(one, step, 1)
        one.save(step)
    shard = next(one.job.copies.path.glob("step-*7/shard-*.safetensors"))
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    drain_all(one)
    assert durable(root) == [5]


def test_the_step_that_needs_no_lost_node_comes_right_after_the_newest(nodes: tuple[Node, Node], root: Path) -> None:
    one, _ = nodes
    one.job.notes.write_common(Common(START.id, 2, 2, -1))
    for step in (2, 3, 4, 5, 6):
        one.save(step)
    one.drainer.tick()
    one.drainer.tick()
    assert partial(root) == [2, 6]
    drain_all(one)
    assert set(partial(root)) == {stamp.step for stamp, _ in one.job.snapshots.shard_ids()}


def test_it_stays_on_storage_though_newer_ones_wait_there(nodes: tuple[Node, Node], root: Path) -> None:
    one, _ = nodes
    one.job.notes.write_common(Common(START.id, 2, 2, -1))
    for step in (2, 3, 4, 5, 6):
        one.drain(step)
    assert partial(root) == [2, 3, 4, 5, 6]
