"""What tests of all parts share. Nothing here is replaced by a mock: memory is tmpfs, locks are the kernel's."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import settings

from rekindle.snapshot.documents import Receipt, checksum
from rekindle.snapshot.layout import Chunk, Layout
from rekindle.snapshot.lineage import Stamp
from rekindle.snapshot.memory import JobDir
from tests.faults.harness import end_agent

settings.register_profile("rekindle", deadline=None)  # machines that run tests are busy ones
settings.load_profile("rekindle")

ShardOf = Callable[..., tuple[Receipt, bytes]]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A memory store of the test's own; agents that still serve it are ended afterwards."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="rekindle-test-", dir=parent))
    monkeypatch.setenv("REKINDLE_MEMORY", str(path))
    yield path
    for directory in path.glob("rekindle-*/*"):
        end_agent(JobDir(directory))
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoint root that nobody has made yet."""
    return tmp_path / "run"


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a tmpfs of so many bytes; a full one is a real one."""
    mounted: list[Path] = []

    def mount(nbytes: int) -> Path:
        path = tmp_path / f"tmpfs-{len(mounted)}"
        path.mkdir()
        if os.getuid() != 0:
            pytest.skip("only root can mount a small tmpfs")
        command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes},mode=700", "tmpfs", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"a small tmpfs can't be mounted here: {done.stderr.strip()}")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)


def make_shard(stamp: Stamp, data: Mapping[str, bytes]) -> tuple[Receipt, bytes]:
    """A receipt and its shard's bytes, made by hand: byte tensors in a ``Values`` that the state calls "v"."""
    layout = Layout.build(Chunk(f"v.{n}", "uint8", (len(b),), (0,), (len(b),)) for n, b in data.items())
    body = b"".join(data[chunk.name.removeprefix("v.")] for chunk in layout.chunks)
    sums = [checksum(body[start:stop]) for start, stop in layout.blocks]
    static = Receipt.static_part(layout, {"v": {name: {"$tensor": f"v.{name}"} for name in data}})
    return Receipt.decode(Receipt.encode(stamp, static, sums, b"[]"), "made by hand"), layout.header + body


@pytest.fixture(scope="session")
def shard_of() -> ShardOf:
    """``make_shard``, for tests of parts that never hold torch."""
    return make_shard
