"""Copies of another node's shards: what is left out of them, and every byte verified."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from rekindle.common.failpoints import POINTS, arm
from rekindle.errors import CorruptError
from rekindle.format.layout import BLOCK, Chunk, Layout
from rekindle.format.lineage import ShardId
from rekindle.format.names import receipt_name, shard_name, step_dir
from rekindle.format.receipt import Receipt
from rekindle.memory.job_dir import JobDir
from rekindle.memory.nodes import Node, Nodes
from rekindle.memory.notes import Common
from rekindle.peers.unique import UniqueChunks, likely_ranks, ranks_apart
from tests.fork_server import context
from tests.peers.peer import FIRST, HOST, blocks_of, put
from tests.peers.source import copy, serving, tensors_at

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


def test_a_copy_has_the_chunks_that_were_chosen_and_all_else(far: JobDir, near: JobDir) -> None:
    data = {"a": b"a" * 100, "b": b"b" * (BLOCK + 5), "c": b"", "d": b"d" * 3_000_001}
    path = put(far, 7, data, 0, 2)
    with serving(far) as nodes:
        whole = copy(near, nodes, 7, "bcd")[0]
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
