"""Paths and files that are none: a named error each, and nothing outside is touched."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.agent.file_drain import FileDrainer
from rekindle.memory.files_dir import FilesDir
from rekindle.storage.path_place import PathPlace
from tests.files.test_save_and_load import forget


def everything(path: Path) -> dict[str, bytes | None]:
    return {
        str(one.relative_to(path)): one.read_bytes() if one.is_file() and not one.is_symlink() else None
        for one in sorted(path.rglob("*"))
    }


@pytest.mark.parametrize(
    "bad",
    ["", ".", "..", "dir/..", "a/../b", "dir", "dir/", "link", "fifo", "file/below", "a\0b", "n" * 300, "\ud800", 17],
)
def test_what_can_not_be_saved_to(bad: Any, drainer: FileDrainer, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dir").mkdir()
    (tmp_path / "file").write_bytes(b"kept")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "fifo")
    before = everything(tmp_path)
    with pytest.raises(rekindle.UsageError):
        rekindle.save(b"data", bad)
    assert everything(tmp_path) == before and rekindle.files.status() == []


@pytest.mark.parametrize(
    "bad", ["ftp://host/x", "s3://", "s3://bucket", "s3://bucket/../x", "file://host/x", "s3:/bucket/x"]
)
def test_urls_that_are_none(bad: str, drainer: FileDrainer, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(rekindle.UsageError, match=r"^path "):
        rekindle.save(b"data", bad)
    assert everything(tmp_path) == {}


def test_no_right_to_write(drainer: FileDrainer, root: Path) -> None:
    if os.getuid() == 0:
        pytest.skip("root may write everywhere")
    root.mkdir(mode=0o500)
    with pytest.raises(rekindle.UsageError, match="no right to write"):
        rekindle.save(b"data", root / "x")


def test_a_file_system_that_is_mounted_for_reading(drainer: FileDrainer, mounted: Callable[..., Path]) -> None:
    place = mounted("ro", "-t", "tmpfs", "-o", "ro", "tmpfs")
    with pytest.raises(rekindle.UsageError, match="no right to write"):
        rekindle.save(b"data", place / "x")
    assert rekindle.files.status() == []


def test_what_is_not_there(store: FilesDir, root: Path) -> None:
    for path in (root, root / "x", root / "x" / "y"):
        with pytest.raises(rekindle.NotFoundError):
            rekindle.load(path)
        with pytest.raises(rekindle.NotFoundError):
            rekindle.flush(path)


def test_storage_that_refuses_a_load_says_what_to_do(store: FilesDir, root: Path, monkeypatch) -> None:
    def refuse(_: PathPlace) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(PathPlace, "open", refuse)
    with pytest.raises(OSError, match=f"look at the disk and the kernel's log: '{root}/x'"):
        rekindle.load(root / "x")


def test_a_directory_is_no_file(store: FilesDir, root: Path) -> None:
    root.mkdir()
    for load in (rekindle.load, rekindle.files.preload):
        with pytest.raises(rekindle.UsageError, match="directory"):
            load(root)


class Evil:
    """Leaves a trace when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def test_no_code_runs_from_memory_and_from_the_path(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    trace = root.parent / "trace"
    rekindle.save({"x": Evil(trace)}, root / "evil.pt")
    for _ in range(2):
        with pytest.raises(pickle.UnpicklingError):
            rekindle.load(root / "evil.pt")
        assert not trace.exists()
        drainer.tick()
        forget(store)
    (root / "plain.pkl").write_bytes(pickle.dumps(Evil(trace)))
    with pytest.raises(rekindle.FormatError):
        rekindle.load(root / "plain.pkl", weights_only=False)
    assert not trace.exists()


@pytest.fixture
def arrived(drainer: FileDrainer, store: FilesDir, root: Path) -> Path:
    """A file on storage that memory has forgotten."""
    torch.manual_seed(7)
    rekindle.save({"x": torch.randn(200_000), "y": torch.randn(3)}, root / "x.pt")
    assert drainer.tick()
    forget(store)
    return root / "x.pt"


@pytest.mark.parametrize("part", [0.3, 0.9])
def test_a_flipped_bit_at_the_path(arrived: Path, part: float) -> None:
    data = bytearray(arrived.read_bytes())
    data[int(part * len(data))] ^= 4
    arrived.write_bytes(data)
    for load in (rekindle.load, rekindle.files.preload):
        with pytest.raises(rekindle.CorruptError, match="CRC-32"):
            load(arrived)
    assert rekindle.files.status() == []


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_file_at_the_path(arrived: Path, part: float) -> None:
    size = arrived.stat().st_size
    os.truncate(arrived, int(part * size))
    with pytest.raises(rekindle.CorruptError):
        rekindle.load(arrived)


@pytest.mark.parametrize("head", [b"\x89HDF\r\n\x1a\n", b"mindio\0", b"", b"PK\x03\x04" + bytes(500)])
def test_foreign_magic(head: bytes, store: FilesDir, root: Path) -> None:
    root.mkdir()
    (root / "x").write_bytes(head)
    with pytest.raises(rekindle.CorruptError):
        rekindle.load(root / "x")


def flip(store: FilesDir) -> None:
    (file,) = store.kept.files()
    with open(file.data, "r+b") as data:
        data.seek(file.data.stat().st_size // 2)
        byte = data.read(1)
        data.seek(-1, os.SEEK_CUR)
        data.write(bytes([byte[0] ^ 1]))


def test_a_flipped_bit_in_memory_that_storage_has(
    drainer: FileDrainer, store: FilesDir, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rekindle.save({"x": torch.ones(500_000)}, root / "x.pt")
    assert drainer.tick()
    flip(store)
    assert torch.equal(rekindle.load(root / "x.pt")["x"], torch.ones(500_000))
    assert "storage is read instead" in caplog.text


@pytest.mark.parametrize("what", ["size", "receipt"])
def test_a_file_of_the_wrong_size_or_receipt_in_memory_that_storage_has(
    what: str, drainer: FileDrainer, store: FilesDir, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rekindle.save({"x": torch.ones(5)}, root / "x.pt")
    assert drainer.tick()
    (file,) = store.kept.files()
    if what == "size":
        os.truncate(file.data, 100)
    else:
        file.receipt.write_bytes(file.receipt.read_bytes().replace(b"torch", b"tirch"))
    assert torch.equal(rekindle.load(root / "x.pt")["x"], torch.ones(5))
    assert "storage is read instead" in caplog.text
    rekindle.files.preload(root / "x.pt")
    assert [file.problem for file in rekindle.files.status()] == [None]


def test_a_flipped_bit_in_memory_that_storage_lacks(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    path = root / "x.pt"
    rekindle.save({"step": 1}, path)
    assert drainer.tick()
    rekindle.save({"x": torch.ones(500_000)}, path)
    flip(store)
    with pytest.raises(rekindle.CorruptError, match="is older"):
        rekindle.load(path)
    assert not drainer.tick()
    assert torch.load(path, weights_only=True) == {"step": 1}, "what is damaged does not replace what is sound"
    with pytest.raises(rekindle.NotDurableError, match="differs from its checksum"):
        drainer.tick()
        store.notes.write_agent_status({"error": None, "failed": drainer.progress.failed})
        rekindle.flush(timeout=0)


def test_a_damaged_receipt_in_memory(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    rekindle.save(b"data", root / "x")
    (file,) = store.kept.files()
    text = file.receipt.read_bytes()
    file.receipt.write_bytes(text.replace(b"/x", b"/y"))
    with pytest.raises(rekindle.FormatError):
        rekindle.load(root / "x")
    assert not drainer.tick() and not root.exists()
    assert [one.problem is not None for one in rekindle.files.status()] == [True]


def test_memory_that_others_can_enter_is_not_trusted(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    rekindle.save(b"data", root / "x")
    store.path.parent.chmod(0o755)
    with pytest.raises(rekindle.MemoryStoreError, match="open to others"):
        rekindle.load(root / "x")
    store.path.parent.chmod(0o700)
