"""Opening and verifying one shard."""

from __future__ import annotations

import pytest

from rekindle.errors import CorruptError, FormatError
from rekindle.format.layout import BLOCK
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.shard import OpenShard
from rekindle.storage.verify import verify_shard

STAMP = ShardId(7, 0, 1, Incarnation(1, "a" * 16))
DATA = {"a": bytes(range(200)), "b": b"", "c": b"c" * (BLOCK + 5)}


@pytest.fixture
def shard(tmp_path, shard_of):
    receipt, data = shard_of(STAMP, DATA)
    (tmp_path / "s.json").write_bytes(receipt.raw)
    (tmp_path / "s.safetensors").write_bytes(data)
    return tmp_path / "s.json"


both = pytest.mark.parametrize("in_memory", [True, False], ids=["memory", "storage"])


@both
def test_a_sound_shard_has_no_problems_and_is_read_whole(shard, in_memory):
    counted = []
    with OpenShard.open(shard, in_memory=in_memory) as opened:
        assert verify_shard(opened, counted.append) == []
        assert sum(counted) == opened.receipt.file_bytes


@both
@pytest.mark.parametrize(("tensor", "at"), [("v.a", 0), ("v.a", 199), ("v.c", 0), ("v.c", BLOCK), ("v.c", BLOCK + 4)])
def test_a_flipped_byte_names_file_tensor_and_step(shard, in_memory, tensor, at):
    file = shard.with_suffix(".safetensors")
    with OpenShard.open(shard, in_memory=in_memory) as opened:
        layout, base = opened.receipt.layout, opened.receipt.header_bytes
    (start,) = [c.start for c in layout.chunks if c.name == tensor]
    flip(file, base + start + at)
    with OpenShard.open(shard, in_memory=in_memory) as opened:
        problems = verify_shard(opened)
    (problem,) = problems
    assert isinstance(problem, CorruptError)
    for part in (str(file), repr(tensor), "step 7"):
        assert part in str(problem)


@both
@pytest.mark.parametrize("at", [0, 7, 8, 100, 4095])
def test_a_flipped_byte_of_the_header_is_named(shard, in_memory, at):
    flip(shard.with_suffix(".safetensors"), at)
    with OpenShard.open(shard, in_memory=in_memory) as opened:
        problems = verify_shard(opened)
    (problem,) = problems
    assert "header" in str(problem) and "step 7" in str(problem)


@both
def test_each_damaged_tensor_is_named_once(shard, in_memory):
    file = shard.with_suffix(".safetensors")
    for at in (3, 4096, 4096 + 10_000, file.stat().st_size - 1):
        flip(file, at)
    with OpenShard.open(shard, in_memory=in_memory) as opened:
        problems = verify_shard(opened)
    assert len(problems) == 3
    assert "header" in str(problems[0]) and "'v.a'" in str(problems[1]) and "'v.c'" in str(problems[2])


@pytest.mark.parametrize(("change", "in_memory"), [(-1, True), (-5000, True), (-1, False), (1, False), (-5000, False)])
def test_a_shard_of_another_length_is_not_opened(shard, in_memory, change):
    file = shard.with_suffix(".safetensors")
    data = file.read_bytes()
    file.write_bytes(data[:change] if change < 0 else data + b"x")
    with pytest.raises(CorruptError, match=r"s\.safetensors"):
        OpenShard.open(shard, in_memory=in_memory)


def test_a_file_in_memory_is_read_while_what_a_larger_state_left_of_it_is_given_back(shard):
    size = shard.with_suffix(".safetensors").stat().st_size
    with open(shard.with_suffix(".safetensors"), "ab") as file:
        file.write(b"x" * 5000)
    with OpenShard.open(shard, in_memory=True) as opened:
        assert not verify_shard(opened) and len(opened.map()) == size


def test_a_file_that_shrinks_while_it_is_read_is_damaged_and_kills_nobody(shard):
    with OpenShard.open(shard, in_memory=False) as opened:
        with open(shard.with_suffix(".safetensors"), "r+b") as file:
            file.truncate(5000)
        problems = verify_shard(opened)
    assert {str(p).split("tensor ")[1].split()[0] for p in problems} == {"'v.c'"}


@both
def test_a_damaged_receipt_is_not_opened(shard, in_memory):
    flip(shard, shard.stat().st_size // 2)
    with pytest.raises(FormatError, match=r"s\.json"):
        OpenShard.open(shard, in_memory=in_memory)


@both
def test_a_missing_file_is_a_missing_file(shard, in_memory):
    shard.with_suffix(".safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        OpenShard.open(shard, in_memory=in_memory)
    shard.unlink()
    with pytest.raises(FileNotFoundError):
        OpenShard.open(shard, in_memory=in_memory)


def test_writing_into_a_mapped_shard_changes_nobody_elses_bytes(shard):
    before = shard.with_suffix(".safetensors").read_bytes()
    with OpenShard.open(shard, in_memory=True) as opened:
        view = opened.map()
        view[5000:5004] = b"mine"
        view.release()
    assert shard.with_suffix(".safetensors").read_bytes() == before


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x40]))
