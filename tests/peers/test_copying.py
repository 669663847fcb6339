"""Copies of another node's shards: what is left out of them, every byte verified, and the thread that makes them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rekindle.agent.copier import Aim, Copier
from rekindle.errors import CorruptError
from rekindle.format.files import Directory
from rekindle.format.layout import BLOCK, Chunk, Layout
from rekindle.format.lineage import ShardId
from rekindle.format.names import receipt_name, shard_name, step_dir
from rekindle.format.receipt import Receipt
from rekindle.memory.copies import CopySlots
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.local_state import LocalStatePlan, LocalStateWriter
from rekindle.memory.nodes import Node, Nodes
from rekindle.memory.notes import Common
from rekindle.peers import kept_plans
from rekindle.peers.copying import copy_shard
from rekindle.peers.files import PeerFiles
from rekindle.peers.server import Handler, PeerServer
from rekindle.peers.snapshots import snapshot_handlers
from rekindle.peers.unique import is_planned, ranks_apart, unique_chunks
from rekindle.peers.wire import Credentials, Link
from rekindle.storage.verify import verify_shard
from tests.peers.peer import FIRST, HOST, SECRET, blocks_of, far_job, put, wait_until

# -- which chunks ------------------------------------------------------------------------------------------------------


def chunk(name: str, rows: tuple[int, int] = (0, 8), *, own: bool = False) -> Chunk:
    return Chunk(name, "float32", (8, 4), (rows[0], 0), (rows[1] - rows[0], 4), own=own)


def plan_of(*chunks: Chunk, blocks: list[int] | None = None, replicas: Mapping[str, list[int]]) -> LocalStatePlan:
    return LocalStatePlan(Layout.build(chunks), {}, b"", blocks or [], dict(replicas), "", 0)


def copied(plan: LocalStatePlan | None, *chunks: Chunk, apart: tuple[int, ...] = (1,)) -> list[str]:
    return [found.name for found in unique_chunks(Layout.build(chunks), plan, apart)]


def test_replicas_count_on_nodes_of_other_domains_only() -> None:
    nodes = [Node("a", HOST, 1, [0, 1], "r1"), Node("b", HOST, 1, [2], "r1"), Node("c", HOST, 1, [3, 4], "r2")]
    assert ranks_apart(nodes, nodes[0]) == ranks_apart(nodes, nodes[1]) == {3, 4}
    assert ranks_apart(nodes, nodes[2]) == {0, 1, 2}
    alone = [Node(name, HOST, 1, [rank]) for rank, name in enumerate("abc")]
    assert ranks_apart(alone, alone[1]) == {0, 2}, "a node without a domain is one of its own"


def test_only_what_no_other_domain_holds_is_copied() -> None:
    plan = plan_of(*map(chunk, "abcd"), replicas={"a": [0, 1], "b": [0, 2], "c": [0]})
    assert copied(plan, *map(chunk, "abcd")) == ["b", "c", "d"]
    assert copied(plan, *map(chunk, "abcd"), apart=(1, 2)) == ["c", "d"]
    assert copied(None, *map(chunk, "abcd")) == [*"abcd"]


def test_what_a_rank_calls_its_own_or_sends_by_itself_is_copied() -> None:
    plan = plan_of(chunk("a"), chunk("b"), blocks=[1], replicas={"a": [0, 1], "b": [0, 1]})
    assert copied(plan, chunk("a", own=True), chunk("b")) == ["a", "b"]
    assert copied(plan_of(chunk("a", own=True), replicas={"a": [0, 1]}), chunk("a")) == ["a"]


def test_a_rank_that_copies_some_rows_of_a_replica_has_them_found_in_the_plan() -> None:
    plan = plan_of(chunk("a", (0, 6)), replicas={"a": [0, 1]})
    assert copied(plan, chunk("a", (2, 6))) == [] and is_planned(Layout.build([chunk("a", (2, 6))]), plan)
    assert copied(plan, chunk("a", (2, 7))) == ["a"] and not is_planned(Layout.build([chunk("a", (2, 7))]), plan)


# -- one shard ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def far(memory: Path) -> JobDir:
    return far_job(memory)


@pytest.fixture
def near(memory: Path) -> JobDir:
    (memory / "near").mkdir(mode=0o700)
    job = JobDir.of("/somewhere/run", memory_base(memory / "near"))
    job.create()
    return job


def damaged(read: Handler, times: int) -> Handler:
    left = [times]

    def answer(link: Link, message: dict[str, Any]) -> dict[str, Any] | None:
        if not left[0]:
            return read(link, message)
        left[0] -= 1
        size = message["stop"] - message["start"]
        link.send({"bytes": size})
        link.send_bytes(bytes(size))
        return None

    return answer


@contextmanager
def serving(job: JobDir, damages: int = 0, **handlers: Handler) -> Iterator[Nodes]:
    """Serves a job's snapshots as those of node "far", rank 0, of which so many reads yield zeros.

    Gives the nodes as the other one knows them.
    """
    listener = socket.create_server((HOST, 0))
    own = snapshot_handlers(job)
    own["read"] = damaged(own["read"], damages)
    server = PeerServer(listener, lambda: Credentials(SECRET, FIRST.id, "far"), {**own, **handlers})
    server.start()
    try:
        nodes = [Node("far", HOST, listener.getsockname()[1], [0]), Node("near", HOST, 1, [1])]
        yield Nodes(FIRST.id, 1, SECRET, 1, nodes)
    finally:
        server.close()


def copy(near: JobDir, nodes: Nodes, step: int, names: str | None = None) -> Receipt:
    """Copies the tensors of these names. Returns the receipt of the whole shard."""
    slots = CopySlots(near, [0], 2, 0)
    try:
        with PeerFiles.of(nodes, nodes.nodes[0], ShardId(step, 0, 2, FIRST).checkpoint).shard(0, 2) as shard:
            chunks = [c for c in shard.receipt.layout.chunks if names is None or c.name.removeprefix("v.") in names]
            slots.adopt()
            copy_shard(shard, chunks, slots)
            return shard.receipt
    finally:
        slots.close()


def tensors_at(job: JobDir, step: int) -> dict[str, bytes]:
    """The tensors of a shard, whose every byte is verified."""
    with Directory(job.path / step_dir(step), in_memory=True).shard(0, 2) as shard:
        assert verify_shard(shard) == []
        data = bytes(shard.map())[shard.receipt.header_bytes :]
        return {c.name.removeprefix("v."): data[c.start : c.stop] for c in shard.receipt.layout.chunks}


def test_a_copy_has_the_chunks_that_were_chosen_and_all_else(far: JobDir, near: JobDir) -> None:
    data = {"a": b"a" * 100, "b": b"b" * (BLOCK + 5), "c": b"", "d": b"d" * 3_000_001}
    path = put(far, 7, data, 0, 2)
    with serving(far) as nodes:
        whole = copy(near, nodes, 7, "bcd")
        assert tensors_at(near.copies, 7) == {name: data[name] for name in "bcd"}
        receipt = near.copies.path / step_dir(7) / receipt_name(0, 2)
        found = Receipt.decode(receipt.read_bytes(), receipt)
        assert (found.stamp, found.structure, found.values) == (whole.stamp, whole.structure, whole.values)
        copy(near, nodes, 7)
        assert (near.copies.path / step_dir(7) / shard_name(0, 2)).read_bytes() == path.read_bytes()


def test_a_block_that_is_damaged_on_the_way_is_read_again(far: JobDir, near: JobDir) -> None:
    put(far, 7, blocks_of(2), 0, 2)
    with serving(far, damages=1) as nodes:
        copy(near, nodes, 7)
    assert tensors_at(near.copies, 7) == blocks_of(2)


def test_of_a_shard_that_is_damaged_there_is_no_copy_and_the_one_before_stays(far: JobDir, near: JobDir) -> None:
    put(far, 7, {"a": b"12345"}, 0, 2)
    put(far, 8, {"a": b"54321"}, 0, 2)
    with serving(far) as nodes:
        copy(near, nodes, 7)
    with serving(far, damages=2) as nodes, pytest.raises(CorruptError):
        copy(near, nodes, 8)
    assert tensors_at(near.copies, 7) == {"a": b"12345"}
    assert [stamp.step for stamp, _ in near.copies.snapshots.shard_ids()] == [7]


# -- the thread --------------------------------------------------------------------------------------------------------


@pytest.fixture
def copier_of(near: JobDir, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Copier]]:
    monkeypatch.setattr(kept_plans, "_COMES_WITHIN", 0.0)
    with ExitStack() as stack:

        def make(nodes: Nodes, limit: int | None = None) -> Copier:
            copier = Copier(near, nodes, limit, 0)
            stack.callback(copier._thread.join, 60)
            stack.callback(copier.close)
            copier.start()
            return copier

        yield make


def aim_at(step: int, round_: int = 1) -> Aim:
    return Aim(round_, ShardId(step, 1, 2, FIRST), 0.0)


def test_a_step_is_copied_once_the_source_has_it_and_outlives_the_agent(
    far: JobDir, near: JobDir, copier_of: Callable[..., Copier]
) -> None:
    with serving(far) as nodes:
        copier = copier_of(nodes)
        copier.aim(aim_at(7))
        put(far, 6, {"a": b"6"}, 0, 2)
        put(far, 7, {"a": b"7"}, 0, 2)
        wait_until(lambda: copier.copied == {7})
        assert tensors_at(near.copies, 7) == {"a": b"7"} and copier.failed == (-1, -1)
        copier.close()
        after = copier_of(nodes)
        wait_until(lambda: after.copied == {7})


def test_copies_of_a_former_agent_are_known_at_once_and_doubted_as_soon_as_one_is_written_over(
    far: JobDir, near: JobDir, copier_of: Callable[..., Copier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a node has told others of must not be forgotten, and what it lets go of must not be told."""
    near.notes.write_common(Common(FIRST.id, 8, 7, -1))
    with serving(far) as nodes:
        for step in (7, 8):
            put(far, step, {"a": b"%d" % step}, 0, 2)
            copy(near, nodes, step)
        assert Copier(near, nodes, None, 0).copied == {7, 8}
        put(far, 9, blocks_of(2), 0, 2)
        copier = copier_of(nodes, limit=1)
        assert copier.copied == {7, 8}
        copier.aim(aim_at(9))
        wait_until(lambda: copier.progress is not None and copier.progress.done)
        assert copier.copied == {7}, "step 7 is safe"
        copier.hurry(on=True)
        wait_until(lambda: copier.copied == {7, 9})


def test_a_replica_is_left_out_as_the_plan_tells(far: JobDir, near: JobDir, copier_of: Callable[..., Copier]) -> None:
    put(far, 7, {"a": b"a" * 100, "b": b"b" * 100}, 0, 2)
    with serving(far) as nodes:
        with Directory(far.path / step_dir(7), in_memory=True).shard(0, 2) as shard:
            static = Receipt.static_part(shard.receipt.layout, shard.receipt.structure)
        near.copies.create()
        LocalStateWriter(near.copies, 0).set_plan(ShardId(7, 0, 2, FIRST), static, [], {"v.a": [0, 1]})
        copier = copier_of(nodes)
        copier.aim(aim_at(7))
        wait_until(lambda: copier.copied == {7})
    assert tensors_at(near.copies, 7) == {"b": b"b" * 100}


def test_a_step_that_the_source_has_skipped_fails_and_the_next_one_is_copied(
    far: JobDir, copier_of: Callable[..., Copier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.agent.copier._LIST_EVERY", 0.0)
    put(far, 8, {"a": b"8"}, 0, 2)
    with serving(far) as nodes:
        copier = copier_of(nodes)
        copier.aim(aim_at(7))
        wait_until(lambda: copier.failed == (1, 7))
        copier.aim(aim_at(8, 2))
        wait_until(lambda: copier.copied == {8})


def test_failures_warn_once_and_are_tried_in_a_later_round(
    far: JobDir, copier_of: Callable[..., Copier], caplog: pytest.LogCaptureFixture
) -> None:
    put(far, 7, {"a": b"7"}, 0, 2)
    with serving(far, open=lambda link, message: {"error": "no"}) as nodes:
        copier = copier_of(nodes)
        for round_ in (1, 2, 3):
            copier.aim(aim_at(7, round_))
            wait_until(lambda round_=round_: copier.failed == (round_, 7))
    assert caplog.text.count("not safe from the loss of node far (rank 0)") == 1


def test_a_limit_is_lifted_for_those_who_wait_and_holds_up_no_end(
    far: JobDir, near: JobDir, copier_of: Callable[..., Copier]
) -> None:
    put(far, 7, blocks_of(2), 0, 2)
    with serving(far) as nodes:
        copier = copier_of(nodes, limit=1)
        copier.aim(aim_at(7))
        wait_until(lambda: copier.progress is not None and copier.progress[1:] == (BLOCK, 2 * BLOCK))
        copier.close()
        copier._thread.join(30)
        assert not copier._thread.is_alive() and not copier.copied
        copier = copier_of(nodes, limit=1)
        copier.aim(aim_at(7))
        wait_until(lambda: copier.progress is not None and copier.progress.done == BLOCK)
        copier.hurry(on=True)
        wait_until(lambda: copier.copied == {7})
    assert tensors_at(near.copies, 7) == blocks_of(2)
