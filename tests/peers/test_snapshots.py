"""The memory of a node, as other nodes see it: by numbers, never by names, and pinned for as long as they look."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.names import receipt_name
from rekindle.format.receipt import Receipt
from rekindle.memory.job_dir import JobDir
from rekindle.peers.snapshots import snapshot_handlers
from rekindle.peers.wire import Link, WireError, call
from tests.peers.peer import FIRST, far_job, link_to, pinned, put, serving, wait_until

DATA = {"a": bytes(range(200)), "b": b"b" * 5000}
WANTED = ShardId(7, 0, 1, FIRST).to_json()


@pytest.fixture
def job(memory: Path) -> JobDir:
    return far_job(memory)


@pytest.fixture
def link(job: JobDir) -> Iterator[Link]:
    with serving(snapshot_handlers(job)) as port:
        link = link_to(port)
        yield link
        link.close()


def bytes_after(link: Link, message: dict[str, object]) -> bytes:
    room = bytearray(call(link, message, 30)["bytes"])
    link.receive_into(memoryview(room))
    return bytes(room)


def test_a_snapshot_is_listed_opened_and_read(job, link):
    shard = put(job, 7, DATA)
    put(job, 8, DATA, rank=1, world=2)
    listed = [ShardId.from_json(entry) for entry in call(link, {"verb": "list"}, 30)["shards"]]
    assert sorted((one.step, one.rank, one.world) for one in listed) == [(7, 0, 1), (8, 1, 2)]
    receipt = Receipt.decode(bytes_after(link, {"verb": "open", **WANTED}), "sent")
    raw = shard.read_bytes()
    assert receipt.stamp == listed[[one.step for one in listed].index(7)] and receipt.file_bytes == len(raw)
    assert bytes_after(link, {"verb": "read", "start": 0, "stop": len(raw)}) == raw
    assert bytes_after(link, {"verb": "read", "start": 4090, "stop": 4500}) == raw[4090:4500]
    assert bytes_after(link, {"verb": "read", "start": len(raw) - 1, "stop": len(raw) + 9}) == raw[-1:]
    assert bytes_after(link, {"verb": "read", "start": len(raw) + 1, "stop": len(raw) + 9}) == b""


def test_copies_of_another_nodes_snapshots_are_listed_too_and_given_where_there_is_no_snapshot(job, link):
    job.copies.create()
    put(job.copies, 7, {"a": b"copy"}, 1, 2)
    own, copy = put(job, 7, DATA, 0, 2), put(job.copies, 7, {"a": b"copy"}, 0, 2)
    listed = [ShardId.from_json(entry) for entry in call(link, {"verb": "list"}, 30)["shards"]]
    assert {(one.step, one.rank, one.world) for one in listed} == {(7, 0, 2), (7, 1, 2)}

    def given(rank: int) -> bytes:
        return bytes_after(link, {"verb": "open", **ShardId(7, rank, 2, FIRST).to_json()})

    assert given(0) == own.with_suffix(".json").read_bytes() and pinned(own) and not pinned(copy)
    assert given(1) == copy.with_name(receipt_name(1, 2)).read_bytes()
    own.with_suffix(".json").unlink()
    assert given(0) == copy.with_suffix(".json").read_bytes() and pinned(copy)


def test_an_open_snapshot_is_pinned_until_another_is_or_the_link_ends(job, link):
    first, second = put(job, 7, DATA), put(job, 8, DATA)
    bytes_after(link, {"verb": "open", **WANTED})
    assert pinned(first) and not pinned(second)
    bytes_after(link, {"verb": "open", **WANTED, "step": 8})
    assert pinned(second) and not pinned(first)
    link.close()
    wait_until(lambda: not pinned(second))


@pytest.mark.parametrize(
    "change",
    [{"step": 8}, {"rank": 1, "world": 2}, {"incarnation": Incarnation(2, "b" * 16).to_json()}],
    ids=["step", "rank", "start"],
)
def test_another_snapshot_is_gone(job, link, change):
    put(job, 7, DATA)
    bytes_after(link, {"verb": "open", **WANTED})
    assert "gone" in call(link, {"verb": "open", **WANTED, **change}, 30)
    with pytest.raises(WireError, match="opened before"):
        call(link, {"verb": "read", "start": 0, "stop": 1}, 30)


def test_one_that_is_being_written_is_gone(job, link):
    shard = put(job, 7, DATA)
    with open(shard) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "rewritten" in call(link, {"verb": "open", **WANTED}, 30)["gone"]


@pytest.mark.parametrize(
    "message",
    [
        {"verb": "open"},
        {"verb": "open", **WANTED, "rank": "../../../etc/passwd"},
        {"verb": "open", **WANTED, "step": -1},
        {"verb": "open", **WANTED, "rank": 1},
        {"verb": "open", **WANTED, "incarnation": "../x"},
        {"verb": "read", "start": 0, "stop": 1 << 70},
        {"verb": "read", "start": 5, "stop": 4},
        {"verb": "read", "start": -1, "stop": 4},
        {"verb": "read", "stop": 4},
        {"verb": "read", "start": "0", "stop": 4},
    ],
)
def test_nonsense_is_refused_and_the_link_goes_on(job, link, message):
    put(job, 7, DATA)
    bytes_after(link, {"verb": "open", **WANTED})
    with pytest.raises(WireError):
        call(link, message, 30)
    assert len(call(link, {"verb": "list"}, 30)["shards"]) == 1


def test_links_are_not_followed_out_of_the_directory(job, link, memory):
    shard = put(job, 7, DATA)
    elsewhere = memory / "elsewhere"
    shard.rename(elsewhere)
    shard.symlink_to(elsewhere)
    with pytest.raises(WireError, match="link"):
        call(link, {"verb": "open", **WANTED}, 30)
