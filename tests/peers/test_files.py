"""Shards of another node read into place: every byte verified, and every way to fail an OSError that names the node."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle.errors import FormatError
from rekindle.format.layout import BLOCK
from rekindle.format.lineage import Incarnation
from rekindle.format.names import receipt_name, shard_name
from rekindle.format.reader import ShardReader, read_blocks
from rekindle.memory.job_dir import JobDir
from rekindle.memory.slots import Slots
from rekindle.peers import files as peer_files
from rekindle.peers import server, timed_socket
from rekindle.peers.links import Links
from rekindle.peers.server import Handler
from rekindle.peers.snapshots import snapshot_handlers
from rekindle.peers.wire import Link
from tests.memory.saved import FIRST, SIZE, content, save
from tests.peers.peer import (
    Memory,
    blocks_of,
    far_job,
    files_at,
    link_to,
    pinned,
    put,
    serving,
    serving_alone,
    wait_until,
)

SIZES = [0, 1, 4095, 4097, (512 << 10) + 1, 3_000_001, (4 << 20) + 3, BLOCK + 5]


@pytest.fixture
def job(memory: Path) -> JobDir:
    return far_job(memory)


@pytest.fixture
def port(job: JobDir) -> Iterator[int]:
    with serving(snapshot_handlers(job)) as port:
        yield port


@pytest.mark.parametrize(
    "aside", [lambda n: False, lambda n: True, lambda n: n % 3 == 0], ids=["placed", "taken", "both"]
)
def test_every_byte_arrives(job, port, aside):
    made = random.Random(0)
    data = {f"t{number:02}": made.randbytes(size) for number, size in enumerate(SIZES)}
    path = put(job, 7, data | {f"small{number:03}": made.randbytes(made.randrange(300)) for number in range(600)})
    with files_at(port).shard(0, 1) as shard:
        reader, sink, counted = ShardReader(shard), Memory(shard, aside), []
        assert reader.header_is_sound()
        assert read_blocks(reader, sink, range(len(sink.blocks)), counted.append) == []
        assert sink.whole() == path.read_bytes()[shard.receipt.header_bytes :]
        assert sum(counted) == shard.receipt.layout.nbytes
        assert shard.receipt.file_bytes <= reader.nbytes < 1.05 * shard.receipt.file_bytes


def test_files_are_found_by_their_names(job, port):
    path = put(job, 7, {"a": b"12345"}, rank=1, world=2)
    files = files_at(port)
    assert files.read(receipt_name(1, 2)) == path.with_suffix(".json").read_bytes()
    assert files.size(shard_name(1, 2)) == files.shard_size(1, 2) == path.stat().st_size
    assert files.exists(receipt_name(1, 2)) and not files.exists(receipt_name(0, 2))
    for name in ("checkpoint.json", "pinned", shard_name(1, 2), "../x"):
        with pytest.raises(FileNotFoundError, match="far"):
            files.read(name)
    assert "far" in files.named(shard_name(1, 2)) and "secret" not in repr(files)
    assert files == files_at(port) and files != files_at(port, 8)


@pytest.mark.parametrize(("at", "bad"), [(0, []), (BLOCK, [1]), (2 * BLOCK - 1, [1])], ids=["none", "first", "last"])
def test_a_damaged_block_is_found(job, port, at, bad):
    path = put(job, 7, blocks_of(3))
    with files_at(port).shard(0, 1) as shard:
        if bad:
            with open(path, "r+b") as file:
                file.seek(shard.receipt.header_bytes + at)
                file.write(b"\0")
        assert read_blocks(ShardReader(shard), Memory(shard), range(3), to_the_end=True) == bad


def test_a_damaged_header_and_a_damaged_receipt_are_found(job, port):
    path = put(job, 7, {"a": b"12345"})
    with open(path, "r+b") as file:
        file.write(b"\0")
    with files_at(port).shard(0, 1) as shard:
        assert not ShardReader(shard).header_is_sound()
    receipt = path.with_suffix(".json")
    receipt.write_bytes(receipt.read_bytes()[:-2] + b"x}")
    with pytest.raises(FormatError, match="far"):
        files_at(port).shard(0, 1)


def test_a_file_that_ends_early_is_an_error(job, port):
    path = put(job, 7, blocks_of(3))
    with files_at(port).shard(0, 1) as shard:
        os.truncate(path, shard.receipt.header_bytes + 2 * BLOCK + 1)
        with pytest.raises(OSError, match=r"early.*far"):
            read_blocks(ShardReader(shard), Memory(shard), range(3), to_the_end=True)


def test_a_snapshot_of_another_start_is_not_found(job, port):
    put(job, 7, {"a": b"12345"})
    with pytest.raises(FileNotFoundError):
        files_at(port, incarnation=Incarnation(2, "b" * 16)).shard(0, 1)


def test_a_pinned_snapshot_outlasts_later_saves(job, port):
    slots = Slots(job, 0, 1, [0])
    save(slots, 1)
    path = next(job.path.glob("step-*/*.safetensors"))
    with files_at(port, 1, FIRST).shard(0, 1) as shard:
        for step in (2, 3, 4):
            save(slots, step)
        sink = Memory(shard)
        assert read_blocks(ShardReader(shard), sink, range(1)) == []
        assert sink.whole() == content(1, 0, SIZE)
    wait_until(lambda: not pinned(path))
    save(slots, 5)
    save(slots, 6)
    with pytest.raises(FileNotFoundError):
        files_at(port, 1, FIRST).shard(0, 1)


def test_one_that_changed_while_its_connection_was_closed_is_not_read(job, port):
    put(job, 7, {"a": b"12345"})
    with files_at(port).shard(0, 1) as shard:
        shard.remote.close()
        put(job, 7, {"a": b"54321"})
        with pytest.raises(FileNotFoundError, match="recycled"):
            read_blocks(ShardReader(shard), Memory(shard), range(1))


def test_a_connection_that_lay_idle_is_made_anew(job, port):
    put(job, 7, blocks_of(2))
    with files_at(port).shard(0, 1) as shard:
        for _, link in peer_files._IDLE._idle:
            link._stream._socket.shutdown(2)
        sink = Memory(shard)
        assert read_blocks(ShardReader(shard), sink, range(2)) == []
        assert sink.whole() == b"".join(blocks_of(2).values())


def test_many_open_shards_need_few_connections(job, port):
    for rank in range(20):
        put(job, 7, {"a": bytes([rank]) * 100}, rank, 20)
    shards = [files_at(port).shard(rank, 20) for rank in range(20)]
    assert len(peer_files._IDLE._idle) == 8
    for rank, shard in enumerate(shards):
        sink = Memory(shard)
        assert read_blocks(ShardReader(shard), sink, range(1)) == [] and sink.whole() == bytes([rank]) * 100
    for shard in shards:
        shard.close()
    assert peer_files._IDLE._idle == []


def test_kept_connections_serve_shard_after_shard(job):
    links, seen = Links(8), set()

    def noted(handler: Handler) -> Handler:
        def answer(link: Link, message: dict[str, object]) -> dict[str, object] | None:
            seen.add(link)
            return handler(link, message)

        return answer

    def read(port: int, step: int) -> None:
        with files_at(port, step, links=links).shard(0, 1) as shard:
            sink = Memory(shard)
            assert read_blocks(ShardReader(shard), sink, range(2)) == [] and pinned(paths[step])
            assert sink.whole() == b"".join(blocks_of(2).values())
        assert not pinned(paths[step]), "the connection stays, the pin does not"

    handlers = {verb: noted(handler) for verb, handler in snapshot_handlers(job).items()}
    paths = {step: put(job, step, blocks_of(2)) for step in range(6)}
    with serving(handlers) as port:
        for step in range(3):
            read(port, step)
            with pytest.raises(FileNotFoundError, match="far"):
                files_at(port, 6, links=links).shard(0, 1)
        made = len(seen)
        assert made <= 8
        assert files_at(port, 0).shard(0, 1).close() is None and len(seen) == made + 1, "one of its own for all others"
    with serving(handlers, port):  # the next agent
        for step in range(3, 6):
            read(port, step)
    assert len(seen) <= made + 1 + 8
    links.close()
    assert links.take(object()) is None and not links._idle


def test_a_connection_is_closed_where_the_other_node_cannot_keep_it(job):
    """An agent of an older version knows no verb for it."""
    links = Links(8)
    path = put(job, 7, {"a": b"12345"})
    handlers = snapshot_handlers(job)
    del handlers["close"]
    with serving(handlers) as port:
        files_at(port, links=links).shard(0, 1).close()
        wait_until(lambda: not pinned(path))
        assert not links._idle


def test_a_node_with_too_many_connections_is_waited_for(job, port, monkeypatch):
    monkeypatch.setattr(server, "_MOST", 1)
    put(job, 7, {"a": b"12345"})
    busy = link_to(port)
    threading.Timer(0.5, busy.close).start()
    with files_at(port).shard(0, 1) as shard:
        assert ShardReader(shard).header_is_sound()


class Striking(Memory):
    """Sends a signal to the other node once the second block is asked for."""

    def __init__(self, shard, process, number) -> None:
        super().__init__(shard)
        self.strike = threading.Lock()
        self.process, self.number = process, number

    def place(self, block: int):
        if block and self.strike.acquire(blocking=False):
            self.process.send_signal(self.number)
            if self.number == signal.SIGKILL:
                self.process.wait()
        return super().place(block)


def test_a_node_that_dies_meanwhile_is_an_error(job):
    put(job, 7, blocks_of(6))
    with serving_alone(job) as (process, port), files_at(port).shard(0, 1) as shard:
        with pytest.raises(OSError, match="far"):
            read_blocks(ShardReader(shard), Striking(shard, process, signal.SIGKILL), range(6))
        with pytest.raises(ConnectionRefusedError, match="far"):
            files_at(port).shard(0, 1)


def test_a_node_that_stalls_is_an_error_in_time(job, monkeypatch):
    monkeypatch.setattr(timed_socket, "STALL", 1.0)
    for bound in ("_CONNECT_SECONDS", "_REPLY_SECONDS"):
        monkeypatch.setattr(peer_files, bound, 1.0)
    put(job, 7, blocks_of(6))
    with (
        serving_alone(job) as (process, port),
        files_at(port).shard(0, 1) as shard,
        pytest.raises(TimeoutError, match="far"),
    ):
        read_blocks(ShardReader(shard), Striking(shard, process, signal.SIGSTOP), range(6))


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ({"bytes": 257 << 20}, "between"),
        ({"bytes": -1}, "far"),
        ({"bytes": "5"}, "far"),
        ({}, "integer"),
        ({"error": "no"}, "no"),
    ],
    ids=["huge", "negative", "text", "nothing", "error"],
)
def test_nonsense_from_a_node_is_an_error(reply, why):
    with serving({"open": lambda link, message: reply}) as port, pytest.raises(OSError, match=why):
        files_at(port).shard(0, 1)


def test_another_node_at_the_address_is_an_error(job, port):
    put(job, 7, {"a": b"12345"})
    with pytest.raises(OSError, match="in place of"):
        files_at(port, node="other").shard(0, 1)
