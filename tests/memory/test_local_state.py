"""Small states: two steps at a time, damaged ones left out, and what can be inferred from others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rekindle.format.layout import Chunk, Layout
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.receipt import Receipt
from rekindle.memory.elsewhere import Elsewhere
from rekindle.memory.infer import infer_local_state
from rekindle.memory.job_dir import JobDir
from rekindle.memory.local_state import LocalFiles, LocalStateWriter, padded, read_local_files

FIRST = Incarnation(1, "a" * 16)
LAYOUT = Layout.build([Chunk("buffer", "uint8", (5,), (0,), (5,)), Chunk("weight", "float32", (4,), (0,), (4,))])
STATIC = Receipt.static_part(LAYOUT, {"buffer": {"$tensor": "buffer"}})
REPLICAS = {"weight": [0, 1]}


def stamp(step: int, rank: int = 0) -> ShardId:
    return ShardId(step, rank, 2, FIRST, False)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[JobDir]:
    job = JobDir(tmp_path / "job")
    job.path.mkdir()
    return job


def writer(job: JobDir, rank: int = 0, before_update: bool = False) -> LocalStateWriter:
    smalls = LocalStateWriter(job, rank, before_update=before_update)
    smalls.set_plan(stamp(0, rank), STATIC, [1], REPLICAS)
    return smalls


def files_of(job: JobDir, rank: int) -> LocalFiles:
    found = read_local_files(job.paths, rank)
    assert found is not None
    return found


def body(text: bytes) -> memoryview:
    return memoryview(text.ljust(padded(5), b"\0"))


def test_the_newest_two_steps_are_there(job: JobDir) -> None:
    smalls = writer(job)
    for step in range(1, 6):
        smalls.write(stamp(step), json.dumps([step]).encode(), body(b"step%d" % step))
    plan, halves, before = files_of(job, 0)
    assert before is None
    assert [half.stamp.step for half in halves] == [5, 4]
    assert [json.loads(half.values) for half in halves] == [[5], [4]]
    assert bytes(halves[0].tensors[:5]) == b"step5"
    assert plan.digest == halves[0].plan == halves[1].plan
    assert plan.layout == LAYOUT and plan.blocks == [1] and plan.replicas == REPLICAS
    assert not list(job.path.glob(".*"))


@pytest.mark.parametrize("at", [0, 9, 60, -1])
def test_a_damaged_one_is_left_out(job: JobDir, at: int) -> None:
    smalls = writer(job)
    for step in (1, 2):
        smalls.write(stamp(step), b"[1]", body(b"12345"))
    path = job.paths.local_state(0, "1")
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0xFF
    path.write_bytes(raw)
    assert [half.stamp.step for half in files_of(job, 0).states] == [1]
    path.write_bytes(raw[:4])
    assert [half.stamp.step for half in files_of(job, 0).states] == [1]


def test_a_new_plan_takes_the_old_states_along(job: JobDir) -> None:
    smalls = writer(job)
    smalls.write(stamp(1), b"[1]", body(b"12345"))
    smalls.set_plan(stamp(1), STATIC, [0], REPLICAS)
    assert files_of(job, 0).states == []


def put(job: JobDir, rank: int, before: tuple[list[int], bytes], after: tuple[list[int], bytes] | None) -> None:
    writer(job, rank, before_update=True).write(stamp(7, rank), json.dumps(before[0]).encode(), body(before[1]))
    if after is not None:
        smalls = LocalStateWriter(job, rank)
        smalls.set_plan(stamp(0, rank), STATIC, [1], REPLICAS)
        smalls.write(stamp(7, rank), json.dumps(after[0]).encode(), body(after[1]))


@pytest.mark.parametrize(
    ("theirs_before", "theirs_after", "ours", "expected"),
    [
        (([3, 50], b"other"), ([4, 50], b"other"), ([3, 60], b"mine."), ([4, 60], b"mine.")),
        (([3, 50], b"alike"), ([4, 50], b"after"), ([3, 60], b"alike"), ([4, 60], b"after")),
        (([3, 50], b"other"), ([4, 51], b"other"), ([3, 60], b"mine."), None),
        (([3, 50], b"other"), ([4, 50], b"after"), ([3, 60], b"mine."), None),
    ],
    ids=["own stays", "common changes", "own value changes", "own buffer changes"],
)
def test_what_a_dead_rank_would_have_become(
    job: JobDir,
    theirs_before: tuple[list[int], bytes],
    theirs_after: tuple[list[int], bytes],
    ours: tuple[list[int], bytes],
    expected: tuple[list[int], bytes] | None,
) -> None:
    put(job, 0, theirs_before, theirs_after)
    put(job, 1, ours, None)
    files = files_of(job, 1)
    assert files.before is not None
    found = infer_local_state(job, files, 1, Elsewhere())
    if expected is None:
        assert found is None
    else:
        assert found is not None and found.stamp == stamp(7, 1)
        assert (json.loads(found.values), bytes(found.tensors[:5])) == expected


def test_another_program_says_nothing(job: JobDir) -> None:
    put(job, 0, ([3], b"other"), ([4], b"other"))
    put(job, 1, ([3], b"mine."), None)
    files = files_of(job, 1)
    other = files._replace(plan=replace(files.plan, static=b"another layout"))
    assert infer_local_state(job, files, 1, Elsewhere()) is not None
    assert infer_local_state(job, other, 1, Elsewhere()) is None
