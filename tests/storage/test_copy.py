"""A shard on its way to a disk: every byte, none of them unverified, and nothing left in the page cache."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rekindle.errors import CorruptError
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.names import shard_name
from rekindle.storage.catalog import find_copies
from rekindle.storage.copy import copy_shard, write_pieces
from rekindle.storage.direct_io import UncachedFile
from rekindle.storage.posix import PosixStore
from rekindle.storage.throttle import Budget
from rekindle.storage.verify import verify
from tests.conftest import make_shard
from tests.faults.harness import wait_for

STAMP = ShardId(7, 0, 1, Incarnation(1, "a" * 16))
MIB = 1 << 20


def noise(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def aligned(data: bytes) -> memoryview:
    """As a mapped file of the memory store lies."""
    place = mmap.mmap(-1, max(len(data), 1))
    place[: len(data)] = data
    return memoryview(place)[: len(data)]


def shifted(data: bytes) -> memoryview:
    """Puts a shard where no disk can fetch it by itself."""
    place = mmap.mmap(-1, len(data) + 1)
    place[1:] = data
    return memoryview(place)[1:]


Lay = Callable[[bytes], memoryview]


@pytest.fixture
def file_system(tmp_path: Path, mounted: Callable[..., Path]) -> Callable[..., Path]:
    """Mounts a file system of its own; ``mkfs`` makes one of so many bytes in a file."""

    def mount(kind: str, nbytes: int = 0) -> Path:
        source, options = kind, []
        if nbytes:
            image = tmp_path / f"{kind}.image"
            image.touch()
            os.truncate(image, nbytes)
            source, options = str(image), ["-o", "loop"]
            try:
                subprocess.run([f"mkfs.{kind}", "-q", "-F", "-m", "0", source], check=True, capture_output=True)
            except (FileNotFoundError, subprocess.CalledProcessError) as error:
                pytest.skip(f"no {kind} can be made here: {error}")
        return mounted(f"mounted-{kind}", "-t", kind, *options, source)

    return mount


def takes_direct(folder: Path) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / "probe"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
        return True
    except (OSError, AttributeError):
        return False
    finally:
        probe.unlink(missing_ok=True)


def resident(path: Path) -> int:
    """Bytes of the file in the page cache, by the tool of util-linux."""
    command = ["fincore", "--bytes", "--noheadings", "--output", "RES", str(path)]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    except FileNotFoundError:
        pytest.skip("no fincore here")


def files(root: Path) -> set[str]:
    return {path.name for path in root.rglob("*") if path.is_file()}


# -- every byte ------------------------------------------------------------------------------------------------------

SHAPES = {
    "nothing": {},
    "an empty tensor": {"x": b""},
    **{f"{n} bytes": {"x": noise(n)} for n in (1, 511, 512, 4095, 4096, 4097)},
    "just under a piece": {"x": noise(4 * MIB - 4096 - 1)},
    "one piece with its header": {"x": noise(4 * MIB - 4096)},
    "odd blocks": {"x": noise(16 * MIB + 1), "y": noise(4095), "z": noise(16 * MIB - 1)},
    "many small ones": {f"t{n:05}": noise(n % 700, n) for n in range(5000)},
}


@pytest.mark.parametrize("lay", [aligned, shifted])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("where", ["disk", "tmpfs", "ramfs"])
def test_the_file_is_the_source_byte_for_byte(tmp_path, file_system, where, shape, lay: Lay):
    root = tmp_path / "run" if where == "disk" else file_system(where) / "run"
    receipt, data = make_shard(STAMP, SHAPES[shape])
    store, counted = PosixStore(root), []
    store.write_shard(receipt, lay(data), counted.append)
    assert sum(counted) == len(data)
    assert (store._partial(STAMP) / shard_name(0, 1)).read_bytes() == data
    assert store.publish(STAMP)
    assert [verify(copy) for copy in find_copies(None, store)] == [[]]


@pytest.mark.parametrize("limit", [4_000_000, 100_000_000])
def test_the_pieces_of_a_budget_make_the_same_file(tmp_path, limit):
    receipt, data = make_shard(STAMP, {"x": noise(MIB + 77), "y": noise(5000)})
    store = PosixStore(tmp_path)
    store.write_shard(receipt, aligned(data), lambda nbytes: None, Budget(limit))
    assert (store._partial(STAMP) / shard_name(0, 1)).read_bytes() == data


def write(path: Path, receipt, source: memoryview) -> bool:
    """Copies to a new file. Returns True if the copy went past the page cache to the end."""
    with open(path, "wb", buffering=0) as out, UncachedFile(out.fileno(), receipt.file_bytes) as file:
        copy_shard(receipt, source, file, lambda nbytes: None, Budget())
        file.sync()
        return file.direct


def test_which_way_is_taken_is_what_the_file_system_and_the_source_allow(tmp_path, file_system):
    receipt, data = make_shard(STAMP, {"x": noise(9 * MIB + 5)})
    if takes_direct(tmp_path):
        assert write(tmp_path / "a", receipt, aligned(data))
        assert not write(tmp_path / "b", receipt, shifted(data)), (
            "opened for direct I/O, and refused at the first write"
        )
    refuses = file_system("ramfs")
    assert not takes_direct(refuses)
    assert not write(refuses / "c", receipt, aligned(data))


def test_direct_writes_that_are_refused_half_way_go_on_buffered(tmp_path):
    if not takes_direct(tmp_path):
        pytest.skip("this file system refuses direct I/O")
    data = noise(3 * MIB + 100)
    with open(tmp_path / "file", "wb", buffering=0) as out, UncachedFile(out.fileno(), len(data)) as file:
        file.write(aligned(data[:MIB]), 0)
        assert file.direct
        file.write(shifted(data[MIB : 2 * MIB]), MIB)
        assert not file.direct
        file.write(aligned(data[2 * MIB :]), 2 * MIB)
        file.sync()
    assert (tmp_path / "file").read_bytes() == data


# -- the page cache --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lay", [aligned, shifted], ids=["direct", "buffered"])
def test_nothing_of_a_shard_stays_in_the_page_cache(tmp_path, lay: Lay):
    if lay is aligned and not takes_direct(tmp_path):
        pytest.skip("this file system refuses direct I/O")
    receipt, data = make_shard(STAMP, {"x": noise(40 * MIB + 3)})
    store = PosixStore(tmp_path / "run")
    store.write_shard(receipt, lay(data), lambda nbytes: None)
    path = store._partial(STAMP) / shard_name(0, 1)
    before = resident(path)
    wait_for(lambda: path.read_bytes() and resident(path) > 40 * MIB)  # else there is nothing to see here
    assert before <= 16 * 4096


@pytest.mark.parametrize(("lay", "most"), [(aligned, 4096), (shifted, 128 * MIB)], ids=["direct", "buffered"])
def test_a_shard_never_fills_the_page_cache_on_its_way(tmp_path, lay: Lay, most):
    if lay is aligned and not takes_direct(tmp_path):
        pytest.skip("this file system refuses direct I/O")
    receipt, data = make_shard(STAMP, {"x": bytes(256 * MIB)})
    store, seen, done = PosixStore(tmp_path / "run"), [], 0
    path = store._partial(STAMP) / f".{shard_name(0, 1)}.tmp"

    def look(nbytes: int) -> None:
        nonlocal done
        if done // (8 * MIB) != (done + nbytes) // (8 * MIB):
            seen.append(resident(path))
        done += nbytes

    store.write_shard(receipt, lay(data), look)
    assert len(seen) >= 32
    assert max(seen) <= most


# -- damage, and no room ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lay", [aligned, shifted])
@pytest.mark.parametrize(
    ("at", "name"),
    [
        (0, "the header"),
        (4095, "the header"),
        (4096, "'v.x'"),
        (4096 + 16 * MIB - 1, "'v.x'"),
        (4096 + 16 * MIB, "'v.x'"),
        (4096 + 16 * MIB + 100, "'v.x'"),
        (4096 + 16 * MIB + 101, "'v.y'"),
        (4096 + 16 * MIB + 101 + 2 * MIB, "'v.y'"),
        (-4, "'v.y'"),
        (-3, "'v.z'"),
        (-1, "'v.z'"),
    ],
)
def test_a_flipped_byte_is_named_and_nothing_gets_the_shards_name(tmp_path, at, name, lay: Lay):
    receipt, data = make_shard(STAMP, {"x": noise(16 * MIB + 101), "y": noise(3 * MIB), "z": b"end"})
    damaged = bytearray(data)
    damaged[at] ^= 4
    store = PosixStore(tmp_path / "run")
    with pytest.raises(CorruptError, match=f"step 7, rank 0: .*{name} differs"):
        store.write_shard(receipt, lay(bytes(damaged)), lambda nbytes: None)
    assert files(tmp_path) == set()
    assert not store.has_shard(STAMP) and not store.publish(STAMP)


@pytest.mark.parametrize("lay", [aligned, shifted], ids=["direct", "buffered"])
@pytest.mark.parametrize("kind", ["ext2", "ext4"])
def test_a_disk_that_is_full_half_way_is_an_error_and_leaves_no_file(file_system, kind, lay: Lay):
    """ext4 says so before the first byte; ext2 can't set room aside, and says so in the middle."""
    disk = file_system(kind, 24 * MIB)
    store = PosixStore(disk / "run")
    receipt, small = make_shard(ShardId(1, 0, 1, STAMP.incarnation), {"x": noise(MIB)})
    store.write_shard(receipt, lay(small), lambda nbytes: None)
    assert store.publish(receipt.stamp)
    receipt, data = make_shard(STAMP, {"x": noise(32 * MIB)})
    free, done = os.statvfs(disk).f_bavail, []
    with pytest.raises(OSError) as caught:
        store.write_shard(receipt, lay(data), done.append)
    assert caught.value.errno == errno.ENOSPC
    assert bool(done) == (kind == "ext2")
    assert files(store._partial(STAMP)) == set()
    assert os.statvfs(disk).f_bavail >= free - 16
    assert [p.stamp.step for p in store.published()] == [1]
    assert [verify(copy) for copy in find_copies(None, store)] == [[]]


def test_a_file_over_the_limit_of_the_process_is_an_error(tmp_path):
    import resource

    receipt, data = make_shard(STAMP, {"x": noise(4 * MIB)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            PosixStore(tmp_path / "run").write_shard(receipt, aligned(data), lambda nbytes: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert files(tmp_path) == set()


def test_a_write_that_failed_lets_go_of_the_source_at_once() -> None:
    """Its mapping pins a snapshot: kept until garbage is collected, it would leave the next save no room."""

    class Refusing:
        def write(self, data: memoryview, offset: int) -> None:
            raise OSError(errno.EIO, "refused")

    def fail(source: memoryview) -> str:
        pieces = ((source[at : at + MIB], at) for at in range(0, 8 * MIB, MIB))
        try:
            list(write_pieces(pieces, Refusing()))  # type: ignore[arg-type]
        except OSError as error:
            return str(error)
        return ""

    place = mmap.mmap(-1, 8 * MIB)
    gc.disable()
    try:
        with memoryview(place) as source:
            assert "refused" in fail(source)
        place.close()  # BufferError while anything shows a part of it
    finally:
        gc.enable()


def test_an_interrupted_copy_leaves_no_thread_and_no_file(tmp_path):
    import threading

    receipt, data = make_shard(STAMP, {"x": noise(64 * MIB)})

    def stop(nbytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PosixStore(tmp_path / "run").write_shard(receipt, aligned(data), stop)
    assert files(tmp_path) == set()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("rekindle-write")]
    assert not [link for link in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(link)]
