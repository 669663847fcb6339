"""Reading in runs: every way to read gives every byte, in place or not, and says what is damaged."""

from __future__ import annotations

import os
import random
import subprocess
import threading
from pathlib import Path

import pytest

from rekindle.format.layout import BLOCK
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.reader import NullSink, ShardReader, consecutive_runs, read_blocks
from rekindle.format.shard import OpenShard

STAMP = ShardId(7, 0, 1, Incarnation(1, "a" * 16))
SIZES = [
    0,
    1,
    7,
    4095,
    4096,
    4097,
    511 << 10,
    512 << 10,
    (512 << 10) + 1,
    3_000_001,
    (4 << 20) + 3,
    BLOCK,
    BLOCK + 5,
    2 * BLOCK,
]


class Memory(NullSink):
    """Puts blocks into memory of its own; those that ``aside`` picks come by ``take``."""

    def __init__(self, shard: OpenShard, aside=lambda block: False) -> None:
        self.blocks = [bytearray(stop - start) for start, stop in shard.receipt.layout.blocks]
        self.aside = aside

    def place(self, block: int):
        return None if self.aside(block) else memoryview(self.blocks[block])

    def take(self, block: int, at: int, data: memoryview) -> None:
        self.blocks[block][at : at + len(data)] = data

    def whole(self) -> bytes:
        return b"".join(self.blocks)


@pytest.fixture(scope="module")
def data():
    made = random.Random(0)
    tensors = {f"t{number:02}": made.randbytes(size) for number, size in enumerate(SIZES)}
    return tensors | {f"small{number:04}": made.randbytes(made.randrange(300)) for number in range(1000)}


def write(directory: Path, shard_of, data) -> Path:
    receipt, raw = shard_of(STAMP, data)
    (directory / "s.json").write_bytes(receipt.raw)
    with open(directory / "s.safetensors", "wb") as file:
        file.write(raw)
        os.fsync(file.fileno())
    return directory / "s.json"


def evict(path: Path) -> None:
    fd = os.open(path.with_suffix(".safetensors"), os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.fixture
def ramfs(mounted):
    """A file system that refuses direct I/O."""
    return mounted("ramfs", "-t", "ramfs", "ramfs")


@pytest.mark.parametrize("way", ["memory", "cold", "cached"])
@pytest.mark.parametrize(
    "aside", [lambda n: False, lambda n: True, lambda n: n % 3 == 0], ids=["placed", "taken", "both"]
)
def test_every_byte_arrives(tmp_path, shard_of, data, way, aside):
    path = write(tmp_path, shard_of, data)
    if way == "cold":
        evict(path)
    with OpenShard.open(path, in_memory=way == "memory") as shard:
        reader, sink, counted = ShardReader(shard), Memory(shard, aside), []
        assert reader.header_is_sound()
        assert read_blocks(reader, sink, range(len(sink.blocks)), counted.append) == []
        reader.close()
        assert sink.whole() == path.with_suffix(".safetensors").read_bytes()[shard.receipt.header_bytes :]
        assert sum(counted) == shard.receipt.layout.nbytes
        assert shard.receipt.file_bytes <= reader.nbytes < 1.05 * shard.receipt.file_bytes


def test_a_file_system_that_refuses_direct_reads(ramfs, shard_of, data):
    path = write(ramfs, shard_of, data)
    with pytest.raises(OSError):
        os.open(path, os.O_RDONLY | os.O_DIRECT)
    with OpenShard.open(path, in_memory=False) as shard:
        reader, sink = ShardReader(shard), Memory(shard)
        assert read_blocks(reader, sink, range(len(sink.blocks))) == []
        assert sink.whole() == path.with_suffix(".safetensors").read_bytes()[shard.receipt.header_bytes :]


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="no direct I/O here")
def test_a_cold_file_is_read_past_the_page_cache(tmp_path, shard_of, data):
    path = write(tmp_path, shard_of, data)
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system refuses direct I/O")
    evict(path)
    with OpenShard.open(path, in_memory=False) as shard:
        sink = Memory(shard)
        assert read_blocks(ShardReader(shard), sink, range(len(sink.blocks))) == []
    assert resident(path) < 0.1


def resident(path: Path) -> float:
    """The share of the file that the page cache holds, by the tool of util-linux."""
    command = ["fincore", "--bytes", "--noheadings", "--output", "RES,SIZE", str(path.with_suffix(".safetensors"))]
    try:
        there, size = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except FileNotFoundError:
        pytest.skip("no fincore here")
    return int(there) / int(size)


@pytest.mark.parametrize("in_memory", [True, False], ids=["memory", "storage"])
def test_a_file_that_gets_shorter_is_damaged_from_there_on(tmp_path, shard_of, data, in_memory):
    path = write(tmp_path, shard_of, data)
    with OpenShard.open(path, in_memory=in_memory) as shard:
        blocks, base = shard.receipt.layout.blocks, shard.receipt.header_bytes
        cut = base + blocks[600][0] + 1
        evict(path)
        os.truncate(path.with_suffix(".safetensors"), cut)
        sink = Memory(shard)
        bad = read_blocks(ShardReader(shard), sink, range(len(blocks)), to_the_end=True)
        assert bad == [number for number, (_, stop) in enumerate(blocks) if base + stop > cut]


def test_reading_stops_early_when_nothing_else_is_wanted(tmp_path, shard_of):
    path = write(tmp_path, shard_of, {f"t{n:03}": bytes([n]) * BLOCK for n in range(12)})
    with OpenShard.open(path, in_memory=True) as shard:
        with open(path.with_suffix(".safetensors"), "r+b") as file:
            file.seek(shard.receipt.header_bytes)
            file.write(b"x")
        reader, judged = ShardReader(shard), threading.Event()

        class Waiting(Memory):
            """Keeps the other threads until the damaged block was found: on a busy machine they might be through."""

            def place(self, number):
                assert number == 0 or judged.wait(60)
                return super().place(number)

        assert read_blocks(reader, Waiting(shard), range(12), lambda _: judged.set()) == [0]
        assert reader.nbytes <= 10 * BLOCK


def test_runs_are_neighbours_of_some_mebibytes(shard_of):
    receipt, _ = shard_of(STAMP, {f"t{n:04}": bytes(60_000) for n in range(500)} | {"u": bytes(3 * BLOCK + 1)})
    layout = receipt.layout
    wanted = [n for n in range(len(layout.blocks)) if n % 100 != 50]
    found = list(consecutive_runs(layout, wanted))
    assert [n for run in found for n in run] == wanted
    for run in found:
        assert run == list(range(run[0], run[-1] + 1))
        assert len(run) == 1 or layout.blocks[run[-1]][1] - layout.blocks[run[0]][0] <= 8 << 20
    assert len(found) <= 5 + 4 + 4
