"""Copies of another node's shards: what is left out of them, every byte verified, and the thread that makes them."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rekindle.agent.copier import Aim, Copier, _pace
from rekindle.common.failpoints import POINTS, arm
from rekindle.errors import CorruptError
from rekindle.format.files import Directory
from rekindle.format.layout import BLOCK, Chunk, Layout
from rekindle.format.lineage import ShardId
from rekindle.format.names import receipt_name, shard_name, step_dir
from rekindle.format.receipt import Receipt
from rekindle.memory.copies import CopySlots
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.nodes import Node, Nodes
from rekindle.memory.notes import Common
from rekindle.peers.copying import copy_shard
from rekindle.peers.files import PeerFiles
from rekindle.peers.server import Handler, PeerServer
from rekindle.peers.snapshots import snapshot_handlers
from rekindle.peers.unique import UniqueChunks, likely_ranks, ranks_apart
from rekindle.peers.wire import Credentials, Link
from rekindle.storage.verify import verify_shard
from tests.fork_server import context
from tests.peers.peer import FIRST, HOST, SECRET, blocks_of, put, wait_until

# -- which chunks ------------------------------------------------------------------------------------------------------


def chunk(name: str, rows: tuple[int, int] = (0, 8), *, own: bool = False) -> Chunk:
    return Chunk(name, "float32", (8, 4), (rows[0], 0), (rows[1] - rows[0], 4), own=own)


def told(rank: int, *parts: tuple[Chunk, int], step: int = 7, world: int = 8, save: str = "") -> Receipt:
    """The receipt of chunks, each with a number that stands for its bytes."""
    numbers, layout = {part.name: number for part, number in parts}, Layout.build(part for part, _ in parts)
    sums = [f"{numbers[part.name]:016x}" for part in layout.chunks for _ in range(part.block_count)]
    raw = Receipt.encode(ShardId(step, rank, world, FIRST, save=save), Receipt.static_part(layout, {}), sums, b"[]")
    return Receipt.decode(raw, "made by hand")


def copied(receipt: Receipt, *others: Receipt) -> list[str]:
    unique = UniqueChunks(receipt)
    for other in others:
        unique.leave_out(other)
    return [found.name for found in unique.chunks()]


def test_replicas_count_on_nodes_of_other_domains_only() -> None:
    nodes = [Node("a", HOST, 1, [0, 1], "r1"), Node("b", HOST, 1, [2], "r1"), Node("c", HOST, 1, [3, 4], "r2")]
    assert ranks_apart(nodes, nodes[0]) == ranks_apart(nodes, nodes[1]) == {3, 4}
    assert ranks_apart(nodes, nodes[2]) == {0, 1, 2}
    alone = [Node(name, HOST, 1, [rank]) for rank, name in enumerate("abc")]
    assert ranks_apart(alone, alone[1]) == {0, 2}, "a node without a domain is one of its own"


def test_only_what_no_other_shard_shows_with_the_same_bytes_is_copied() -> None:
    mine = told(0, (chunk("a"), 1), (chunk("b"), 2), (chunk("c"), 3))
    assert copied(mine) == ["a", "b", "c"]
    assert copied(mine, told(1, (chunk("a"), 1), (chunk("b"), 9))) == ["b", "c"]
    assert copied(mine, told(1, (chunk("a"), 1)), told(2, (chunk("c"), 3), (chunk("b"), 9))) == ["b"]
    assert copied(mine, told(1, (chunk("a"), 2), (chunk("b"), 1))) == ["a", "b", "c"]


def test_other_boxes_steps_and_saves_and_what_a_rank_calls_its_own_show_nothing() -> None:
    mine = told(0, (chunk("a"), 1), save="a" * 16)
    for other in (
        told(1, (chunk("a", (0, 4)), 1), save="a" * 16),
        told(1, (chunk("a", own=True), 1), save="a" * 16),
        told(1, (chunk("a"), 1), save="a" * 16, step=8),
        told(1, (chunk("a"), 1), save="a" * 16, world=4),
        told(1, (chunk("a"), 1), save="b" * 16),
    ):
        assert copied(mine, other) == ["a"]
    assert copied(mine, told(1, (chunk("a"), 1), save="a" * 16)) == []
    assert copied(told(0, (chunk("a", own=True), 1)), told(1, (chunk("a"), 1))) == ["a"]


def test_ranks_with_replicas_are_as_many_apart_as_a_tensor_has_parts() -> None:
    others = range(1, 8)
    assert likely_ranks(told(0, (chunk("a"), 1)), others) == [*others], "all have all"
    quarter = told(3, (chunk("a", (0, 2)), 1), (chunk("b", (2, 4)), 1), (chunk("own", own=True), 1))
    assert likely_ranks(quarter, [0, 1, 2, 4, 5, 6, 7]) == [7]
    assert likely_ranks(told(2, (chunk("a", (0, 4)), 1)), [0, 1, 3, 4, 6]) == [4, 6, 0], "the next ones first"
    assert likely_ranks(told(0, (chunk("own", own=True), 1)), others) == []


# -- one shard ---------------------------------------------------------------------------------------------------------


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
def served(job: JobDir, node: Node, damages: int = 0, **handlers: Handler) -> Iterator[Node]:
    """Serves a job's snapshots as those of a node, of which so many reads yield zeros. Gives it with its port."""
    listener = socket.create_server((HOST, 0))
    own = snapshot_handlers(job)
    own["read"] = damaged(own["read"], damages)
    server = PeerServer(listener, lambda: Credentials(SECRET, FIRST.id, node.name), {**own, **handlers})
    server.start()
    try:
        yield replace(node, port=listener.getsockname()[1])
    finally:
        server.close()


@contextmanager
def serving(job: JobDir, damages: int = 0, **handlers: Handler) -> Iterator[Nodes]:
    """Serves node "far", with rank 0. Gives the nodes as the other one, with rank 1, knows them."""
    with served(job, Node("far", HOST, 0, [0]), damages, **handlers) as far:
        yield Nodes(FIRST.id, 1, SECRET, 1, [far, Node("near", HOST, 1, [1])])


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


def tensors_at(job: JobDir, step: int, world: int = 2) -> dict[str, bytes]:
    """The tensors of a shard, whose every byte is verified."""
    with Directory(job.path / step_dir(step), in_memory=True).shard(0, world) as shard:
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
    assert steps_of(near) == [7]


def steps_of(near: JobDir) -> list[int]:
    return sorted(stamp.step for stamp, _ in near.copies.snapshots.shard_ids())


def copy_until(point: str, near: Path, nodes: Nodes) -> None:
    """An agent that copies three steps, and dies at a point."""
    arm(point)
    for step in (7, 8, 9):
        copy(JobDir(near), nodes, step)


@pytest.mark.parametrize("point", [point for point in POINTS["save"] if point != "save.copying"])
def test_an_agent_that_is_killed_at_any_rename_of_a_copy_leaves_sound_ones_and_the_safe_one(
    point: str, far: JobDir, near: JobDir
) -> None:
    """``save.copying`` is where a trainer copies its own memory: nothing of a step has a name until it is whole."""
    data = {step: {"a": b"%d" % step} for step in (7, 8, 9)}
    for step, tensors in data.items():
        put(far, step, tensors, 0, 2)
    near.notes.write_common(Common(FIRST.id, 8, 7, -1))
    with serving(far) as nodes:
        agent = context.Process(target=copy_until, args=(f"{point}@9", near.path, nodes))
        agent.start()
        agent.join(60)
        assert agent.exitcode == -signal.SIGKILL
        assert steps_of(near) == ([7, 9] if point == "save.committed" else [7])
        assert {step: tensors_at(near.copies, step) for step in steps_of(near)}.items() <= data.items()
        copy(near, nodes, 9)
        assert {step: tensors_at(near.copies, step) for step in steps_of(near)} == {step: data[step] for step in (7, 9)}
        assert len([*near.copies.path.rglob("*.slot"), *near.copies.path.rglob("*.safetensors")]) == 2


CHANGES = frozenset(
    ["fcntl.flock", "mmap.__new__", "open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate"]
)
"""What Python audits of all that changes files, their names and their locks."""


def copy_until_call(number: int, near: Path, nodes: Nodes) -> None:
    """An agent that copies step 9, and dies before its call of that number that changes something."""
    calls = itertools.count()

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in CHANGES and (event != "open" or args[2] & os.O_CREAT) and next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)
    copy(JobDir(near), nodes, 9)


def dies(number: int, near: JobDir, nodes: Nodes) -> bool:
    """Lets such an agent copy. False if it has come to its end before."""
    agent = context.Process(target=copy_until_call, args=(number, near.path, nodes))
    agent.start()
    agent.join(60)
    assert agent.exitcode in (0, -signal.SIGKILL)
    return agent.exitcode != 0


@pytest.mark.campaign(seconds=40)
@pytest.mark.timeout(900)
def test_agents_that_are_killed_before_any_call_of_a_copy_leave_sound_ones_and_the_safe_one(
    far: JobDir, near: JobDir, memory: Path
) -> None:
    """All states of names that a kill can leave, and for each of them a third of those that a second one can leave."""
    data = {step: {"a": b"%d" % step} for step in (7, 8, 9)}
    for step, tensors in data.items():
        put(far, step, tensors, 0, 2)
    near.notes.write_common(Common(FIRST.id, 8, 7, -1))
    states = itertools.count()

    def again(job: JobDir) -> JobDir:
        return JobDir(shutil.copytree(job.path, memory / f"state-{next(states)}"))

    with serving(far) as nodes:
        for step in (7, 8):
            copy(near, nodes, step)
        for first in itertools.count():
            once = again(near)
            if not dies(first, once, nodes):
                break
            for second in itertools.count(first % 3, 3):
                twice = again(once)
                died = dies(second, twice, nodes)
                found = {step: tensors_at(twice.copies, step) for step in steps_of(twice)}
                assert 7 in found and found.items() <= data.items(), (first, second)
                if not died:
                    break
            assert found.keys() == {7, 9}, first
            assert len([*twice.copies.path.rglob("*.slot"), *twice.copies.path.rglob("*.safetensors")]) == 2, first
            assert not [*twice.copies.path.rglob("*.tmp")], first
    assert first > 12 and second > 8, "a copy recycles, renames, maps, and commits"


# -- the thread --------------------------------------------------------------------------------------------------------


@pytest.fixture
def copier_of(near: JobDir) -> Iterator[Callable[..., Copier]]:
    with ExitStack() as stack:

        def make(nodes: Nodes, limit: int | None = None) -> Copier:
            copier = Copier(near, nodes, limit, 0)
            stack.callback(copier._thread.join, 60)
            stack.callback(copier.close)
            copier.start()
            return copier

        yield make


def aim_at(step: int, round_: int = 1, world: int = 2) -> Aim:
    return Aim(round_, ShardId(step, 1, world, FIRST), 0.0)


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


def test_what_this_nodes_shard_shows_is_left_out_and_looked_at_anew_at_each_step(
    far: JobDir, near: JobDir, copier_of: Callable[..., Copier]
) -> None:
    put(far, 6, {"other": b"o"}, 0, 2)
    put(near, 6, {"another": b"o"}, 1, 2)
    put(far, 7, {"a": b"a" * 100, "b": b"b" * 100}, 0, 2)
    put(near, 7, {"a": b"a" * 100, "b": b"c" * 100}, 1, 2)
    put(far, 8, {"a": b"x" * 100, "b": b"y" * 100}, 0, 2)
    put(near, 8, {"a": b"a" * 100, "b": b"y" * 100}, 1, 2)
    with serving(far) as nodes:
        copier = copier_of(nodes)
        for step in (6, 7, 8):
            copier.aim(aim_at(step, step))
            wait_until(lambda step=step: step in copier.copied)
    assert tensors_at(near.copies, 7) == {"b": b"b" * 100}
    assert tensors_at(near.copies, 8) == {"a": b"x" * 100}


def test_what_fails_together_with_the_source_shows_nothing(
    far: JobDir, near: JobDir, copier_of: Callable[..., Copier]
) -> None:
    for job, rank in ((far, 0), (near, 1)):
        put(job, 7, {"a": b"a" * 100}, rank, 2)
    with serving(far) as nodes:
        rack = replace(nodes, nodes=[replace(node, domain="rack") for node in nodes.nodes])
        copier = copier_of(rack)
        copier.aim(aim_at(7))
        wait_until(lambda: copier.copied == {7})
    assert tensors_at(near.copies, 7) == {"a": b"a" * 100}


def test_a_replica_on_a_third_node_is_asked_for(
    far: JobDir, near: JobDir, memory: Path, copier_of: Callable[..., Copier]
) -> None:
    (memory / "third").mkdir(mode=0o700)
    third = JobDir.of("/somewhere/run", memory_base(memory / "third"))
    third.create()
    for step in (7, 8):
        put(far, step, {"a": b"a" * 100, "b": b"b" * 100}, 0, 3)
        put(near, step, {"c": b"c" * 100}, 1, 3)
    put(third, 7, {"a": b"a" * 100}, 2, 3)
    with ExitStack() as stack:
        one = stack.enter_context(served(far, Node("far", HOST, 0, [0])))
        last = stack.enter_context(served(third, Node("third", HOST, 0, [2])))
        copier = copier_of(Nodes(FIRST.id, 1, SECRET, 1, [one, Node("near", HOST, 1, [1]), last]))
        copier.aim(aim_at(7, world=3))
        wait_until(lambda: copier.copied == {7})
        copier.aim(aim_at(8, 2, world=3))
        put(third, 8, {"a": b"a" * 100}, 2, 3)  # the last one to come there
        wait_until(lambda: 8 in copier.copied)
    for step in (7, 8):
        assert tensors_at(near.copies, step, 3) == {"b": b"b" * 100}


def test_what_a_third_node_does_not_tell_is_copied(far: JobDir, near: JobDir, copier_of: Callable[..., Copier]) -> None:
    put(far, 7, {"a": b"a" * 100}, 0, 3)
    put(near, 7, {"c": b"c" * 100}, 1, 3)
    with ExitStack() as stack:
        one = stack.enter_context(served(far, Node("far", HOST, 0, [0])))
        refuses = served(far, Node("third", HOST, 0, [2]), open=lambda link, message: {"error": "no"})
        last = stack.enter_context(refuses)
        copier = copier_of(Nodes(FIRST.id, 1, SECRET, 1, [one, Node("near", HOST, 1, [1]), last]))
        copier.aim(aim_at(7, world=3))
        wait_until(lambda: copier.copied == {7})
    assert tensors_at(near.copies, 7, 3) == {"a": b"a" * 100}


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


# -- the pace ----------------------------------------------------------------------------------------------------------


def test_a_copy_takes_most_of_the_time_that_it_has_and_never_most_of_the_network() -> None:
    gigabit, size = 119 << 20, 100 << 20
    assert _pace(size, 10.0, gigabit) == pytest.approx(size / 8)
    assert _pace(size, 1e4, gigabit) == pytest.approx(gigabit / 16)
    assert _pace(size, 1.0, gigabit) == pytest.approx(gigabit / 2)
    assert _pace(1 << 20, 10.0, gigabit) is None, "a small one is over before anybody notices"
    assert _pace(size, 0.0, gigabit) is None and _pace(size, 10.0, None) is None
