"""Valid things to begin with, made once by the product itself."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter, OrderedDict
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rekindle import Values
from rekindle.format.layout import Chunk, Layout
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.names import job_name, receipt_name
from rekindle.format.receipt import Receipt, checksum
from rekindle.save.capture import Capture
from rekindle.save.copy import ShardWriter
from rekindle.storage.posix import PosixStore

__all__ = ["FIRST", "fields_of", "live_state", "scratch_directory", "sealed", "sharded", "single", "two_ranks"]

FIRST = Incarnation(1, "a" * 16)
STEP = 7


@cache
def scratch_directory() -> Path:
    """A directory of this process, in memory where there is some."""
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    path = Path(tempfile.mkdtemp(prefix=f"rekindle-fuzz-{os.getpid()}-", dir=parent))
    import atexit

    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def fields_of(document: bytes) -> dict[str, Any]:
    """All that a document says, its digests left out."""
    fields: dict[str, Any] = json.loads(document)
    del fields["digest"], fields["stamp_digest"]
    return fields


def sealed(stamp: bytes, body: bytes) -> bytes:
    """A document whose digests are right, whatever it says. ``body`` is an object, without the stamp."""
    more = b"," + body[1:] if len(body) > 2 else b"}"
    rest = b'"stamp":' + stamp + b',"stamp_digest":"' + checksum(stamp).encode() + b'"' + more
    return b'{"digest":"' + checksum(rest).encode() + b'",' + rest


def live_state(seed: int = 0) -> dict[str, Any]:
    """A small job's state: a module with a buffer, an optimizer, values of many types."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
        notes: dict[str, Any] = {"epoch": 3, "lr": float("nan"), "name": "run", "seen": (1, [2, {3}]), "none": None}
        notes |= {
            "bytes": b"abc",
            "large": 1 << 70,
            "dtype": torch.bfloat16,
            "order": OrderedDict(a=1, b=torch.ones(2)),
        }
        notes |= {"count": Counter("aab"), "shape": torch.Size([2, 3]), "kept": {(1, 2): torch.zeros(2, 2)}}
    return {"model": model, "optimizer": optimizer, "notes": Values(**notes)}


@cache
def single() -> Path:
    """A root with one checkpoint of a real job of one rank, random generators included."""
    root = scratch_directory() / "single"
    capture = Capture(live_state(), rng=True, allow_pickle=False)
    plan, values = capture.prepare()
    memory = memoryview(bytearray(plan.layout.file_bytes))
    import mmap

    mapped = mmap.mmap(-1, len(memory))
    writer = ShardWriter()
    _, sums = writer.write(plan, mapped, None, 0)
    writer.close()
    receipt = Receipt.decode(Receipt.encode(ShardId(STEP, 0, 1, FIRST), plan.static, sums, values), "made here")
    store = PosixStore(root)
    store.write_shard(receipt, memoryview(mapped), lambda nbytes: None)
    assert store.publish(receipt.stamp)
    return root


def sharded(rank: int) -> tuple[Receipt, bytes]:
    """One of two ranks that share a module, each with a part of an optimizer's state and something of its own."""
    half = 2 * rank
    chunks = [
        Chunk("model.w", "float32", (4, 3), (half, 0), (2, 3)),
        Chunk("optimizer.state.w.exp_avg", "bfloat16", (4, 3), (half, 0), (2, 3)),
        Chunk("notes.own", "int64", (2,), (0,), (2,), own=True),
    ]
    chunks += [Chunk("model.b", "complex64", (3,), (0,), (3,))] if rank == 0 else []
    layout = Layout.build(chunks)
    data = bytes(range(256)) * (layout.nbytes // 256 + 1)
    sums = [checksum(data[start:stop]) for start, stop in layout.blocks]
    structure = {
        "model": {"w": {"$tensor": "model.w"}, "b": {"$tensor": "model.b"}},
        "optimizer": {
            "state": {"w": {"exp_avg": {"$tensor": "optimizer.state.w.exp_avg"}, "step": {"$value": 0}}},
            "param_groups": [{"lr": {"$value": 1}, "params": [{"$value": 2}]}],
        },
        "notes": {"own": {"$tensor": "notes.own"}, "list": {"$tuple": [{"$value": 3}, [{"$value": 4}]]}},
        "odd": {"$dict": [[{"$tuple": [1, "a"]}, {"$value": 3}], [5, {"$ordered": [["x", {"$value": 4}]]}]]},
    }
    values = json.dumps([rank, 0.1, "w", {"$set": [1, 2]}, {"$array": ["<i4", [2, 1], "AQAAAAIAAAA="]}]).encode()
    text = Receipt.encode(ShardId(STEP, rank, 2, FIRST), Receipt.static_part(layout, structure), sums, values)
    return Receipt.decode(text, "made here"), layout.header + data[: layout.nbytes]


@cache
def two_ranks() -> Path:
    """A root with one checkpoint of two ranks."""
    root = scratch_directory() / "two"
    store = PosixStore(root)
    for rank in (0, 1):
        receipt, data = sharded(rank)
        store.write_shard(receipt, memoryview(data), lambda nbytes: None)
    assert store.publish(receipt.stamp)
    return root


def receipts_in(directory: Path, world: int) -> list[Path]:
    return [directory / receipt_name(rank, world) for rank in range(world)]


def job_directory(base: Path, root: Path) -> Path:
    return base / job_name(root)
