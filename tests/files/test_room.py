"""Memory is bounded, and what storage has makes room for what it lacks."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.agent.file_drain import FileDrainer
from rekindle.files import client as clients
from rekindle.memory.files_dir import FilesDir
from rekindle.memory.job_dir import memory_base
from rekindle.storage import disk
from tests.faults.harness import end_agent
from tests.files.programs import run

MIB = 1 << 20


def listed() -> list[tuple[str, str]]:
    return [(Path(file.path).name, file.state) for file in rekindle.files.status()]


def test_the_oldest_that_storage_has_go_first(drainer: FileDrainer, root: Path) -> None:
    rekindle.files.configure(limit="5.5MiB")  # receipts take some of it
    for name in "abcde":
        rekindle.save(bytes(MIB), root / name)
    while drainer.tick():
        pass
    rekindle.save(bytes(MIB), root / "f")
    rekindle.save(bytes(MIB), root / "g")
    assert listed() == [("c", "both"), ("d", "both"), ("e", "both"), ("f", "memory"), ("g", "memory")]


def test_what_storage_lacks_stays_and_the_next_one_is_written_through(
    drainer: FileDrainer, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rekindle.files.configure(limit="2.5MiB")
    assert [rekindle.save(bytes(MIB), root / name) for name in "ab"] == ["memory", "memory"]
    saved = {"x": torch.randn(300_000), "empty": torch.empty(0)}
    assert rekindle.save(saved, root / "c.pt") == "storage"
    assert "written straight to storage" in caplog.text
    assert torch.equal(torch.load(root / "c.pt", weights_only=True)["x"], saved["x"])
    assert torch.equal(rekindle.load(root / "c.pt")["x"], saved["x"])  # its CRC-32 are right
    assert listed() == [("a", "memory"), ("b", "memory")]


def test_a_file_that_can_not_fit_drives_none_out(drainer: FileDrainer, root: Path) -> None:
    rekindle.files.configure(limit="4MiB")
    for name in "ab":
        rekindle.save(bytes(MIB), root / name)
        assert drainer.tick()
    rekindle.save(bytes(MIB), root / "c")
    assert [rekindle.save(bytes(size), root / "d") for size in (5 * MIB, 3 * MIB + 1)] == ["storage"] * 2
    assert listed() == [("a", "both"), ("b", "both"), ("c", "memory")]
    assert rekindle.save(bytes(5 * MIB // 2), root / "d") == "memory"
    assert listed() == [("c", "memory"), ("d", "memory")]


def test_small_files_make_room_with_all_the_pages_that_they_take(drainer: FileDrainer, root: Path) -> None:
    for number in range(100):
        rekindle.save(b"%d" % number, root / str(number))
    while drainer.tick():
        pass
    rekindle.files.configure(limit="1MiB")
    assert rekindle.save(bytes(MIB - 50_000), root / "large") == "memory"
    assert ("large", "memory") in listed() and len(listed()) < 10


def test_an_error_instead_on_demand(drainer: FileDrainer, root: Path) -> None:
    rekindle.files.configure(limit="1MiB", when_full="error")
    with pytest.raises(rekindle.MemoryStoreError, match=r"exceed their limit of 1,048,576, also without"):
        rekindle.save(bytes(2 * MIB), root / "a")
    assert not root.exists() and listed() == []
    rekindle.save(b"small", root / "a")
    assert rekindle.load(root / "a") == b"small"


def test_a_full_file_system_is_no_sigbus(
    small_tmpfs: Callable[[int], Path], store: FilesDir, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REKINDLE_MEMORY", str(small_tmpfs(24 * MIB)))
    small = FilesDir.below(memory_base())
    rekindle.files.configure(limit=10**12)
    assert rekindle.save(bytes(40 * MIB), root / "large") == "storage"
    assert (root / "large").stat().st_size == 40 * MIB
    assert rekindle.save(bytes(8 * MIB), root / "fits") == "memory"
    assert list(small.paths.slots.iterdir()) == []
    rekindle.flush(timeout=60)
    end_agent(small)


def test_an_error_of_a_write_straight_to_storage_names_the_path(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    rekindle.files.configure(limit=1)
    monkeypatch.setattr(disk, "allocate", full)
    with pytest.raises(OSError, match=f"No space left on device: '{root}/x'"):
        rekindle.save(b"data", root / "x")
    assert list(root.iterdir()) == []


def test_files_of_one_size_use_the_same_memory_again(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    size = 20 * MIB
    inodes = set()
    for turn in range(6):
        rekindle.save(bytes([turn]) * size, root / "latest")
        clients._client._pool._maker.wait(60)  # type: ignore[union-attr]
        inodes |= {path.stat().st_ino for path in [*store.kept_path.glob("*.data"), *store.paths.slots.iterdir()]}
        assert rekindle.load(root / "latest") == bytes([turn]) * size
        assert drainer.tick() and (root / "latest").read_bytes() == bytes([turn]) * size
    assert len(inodes) <= 3, "each save should find a slot that is ready"


def test_slots_of_another_size_leave_no_rest_behind(drainer: FileDrainer, root: Path) -> None:
    """The data of an older file must not show through."""
    for number, size in enumerate((40 * MIB, 25 * MIB, 33 * MIB, 20 * MIB + 1, 39 * MIB)):
        data = bytes([65 + number]) * size
        rekindle.save(data, root / "x")
        assert rekindle.load(root / "x") == data
        assert drainer.tick() and (root / "x").read_bytes() == data


def test_slots_that_nobody_uses_go(drainer: FileDrainer, store: FilesDir, root: Path, monkeypatch) -> None:
    rekindle.save(bytes(20 * MIB), root / "x")
    pool = clients._client._pool  # type: ignore[union-attr]
    assert pool._maker.wait(60) and len(list(store.paths.slots.iterdir())) == 1
    later = time.monotonic() + 601
    monkeypatch.setattr("rekindle.files.pool.time.monotonic", lambda: later)
    pool.tidy()
    assert list(store.paths.slots.iterdir()) == []


def test_headroom_is_left_to_data_loaders(drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rekindle.files import pool

    class Room(pool.Room):
        def headroom(self, job: object) -> int:
            return 1 << 60

    monkeypatch.setattr(pool, "Room", Room)
    rekindle.files.configure(when_full="error")
    with pytest.raises(rekindle.MemoryStoreError, match="headroom of other programs"):
        rekindle.save(b"x", root / "x")


def test_without_a_memory_store_files_go_to_storage(
    store: FilesDir, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("REKINDLE_MEMORY", str(tmp_path / "file"))
    assert rekindle.save(b"x", root / "x") == "storage"
    assert (root / "x").read_bytes() == b"x" == rekindle.load(root / "x", raw=True)
    rekindle.files.configure(when_full="error")
    with pytest.raises(rekindle.MemoryStoreError):
        rekindle.save(b"x", root / "x")


def test_a_root_has_a_limit_of_its_own(drainer: FileDrainer, root: Path) -> None:
    rekindle.files.configure(root / "small", limit="2MiB")
    for name in "abc":
        rekindle.save(bytes(MIB), root / "large" / name)
        rekindle.save(bytes(MIB), root / "small" / name)
        while drainer.tick():
            pass
    assert [name for name, _ in listed()] == ["a", "b", "b", "c", "c"], "the oldest below the root goes, and no other"
    assert rekindle.load(root / "small" / "a", raw=True) == bytes(MIB)
    for _ in range(3):
        assert rekindle.save(bytes(2 * MIB), root / "small" / "a") == "memory", "an older one of it does not count"
    assert rekindle.save(bytes(1), root / "small" / "d") == "storage"
    assert rekindle.save(bytes(1), root / "smaller") == "memory"
    rekindle.files.configure(root / "small")
    assert rekindle.save(bytes(1), root / "small" / "e") == "memory"


def test_a_root_says_what_happens_when_memory_is_full(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rekindle.files.configure(root, limit=10)
    rekindle.files.configure(root / "strict", when_full="error")
    with monkeypatch.context() as context, pytest.raises(rekindle.MemoryStoreError, match=rf"below {root} .* of 10"):
        context.delattr("rekindle.files.filling.Filler.fill")  # nothing is copied in vain
        rekindle.save(bytes(11), root / "strict" / "x")
    assert not root.exists() and rekindle.save(bytes(11), root / "x") == "storage"


def test_limits_of_a_root_hold_for_objects_too(drainer: FileDrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    rekindle.files.configure("s3://bucket/runs/", limit=10, when_full="error")
    with pytest.raises(rekindle.MemoryStoreError, match="below s3://bucket/runs "):
        rekindle.save(bytes(11), "s3://bucket/runs/x")
    rekindle.save(bytes(11), "s3://bucket/other/x")


def test_processes_that_save_below_one_root_keep_its_limit(
    drainer: FileDrainer, store: FilesDir, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one commits a file while this one copies its own."""
    rekindle.files.configure(root / "a", limit=10)
    rekindle.save(b"", root / "x")
    client = clients._client
    assert client is not None
    fill = client._filler.fill

    def meanwhile(contents: object, slot: object) -> list[str]:
        monkeypatch.setattr(client._filler, "fill", fill)
        assert run("rekindle.save(b'others', sys.argv[1])", root / "a" / "theirs") == 0
        return fill(contents, slot)  # type: ignore[arg-type]

    monkeypatch.setattr(client._filler, "fill", meanwhile)
    assert rekindle.save(b"ours12", root / "a" / "ours") == "storage"
    assert listed() == [("x", "memory"), ("theirs", "memory")] and list(store.paths.slots.iterdir()) == []


@pytest.mark.parametrize("limits", [{"limit": "2.5MiB"}, {"root": True, "limit": MIB}])
def test_what_goes_for_room_never_brings_an_older_one_back(
    limits: dict[str, Any], drainer: FileDrainer, store: FilesDir, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that a process left, which was killed after it had saved the newer one."""
    drainer.tick()  # its next look for what was left is in some seconds
    rekindle.save(b"1" * MIB, root / "x")
    with monkeypatch.context() as context:
        context.setattr("rekindle.files.pool.Pool._give_up", lambda self, file: None)
        rekindle.save(b"2" * MIB, root / "x")
    assert drainer.tick() and len(store.kept.files()) == 2
    rekindle.files.configure(**limits | ({"root": root} if "root" in limits else {}))
    rekindle.save(b"3" * MIB, root / "y")
    assert [file.read_receipt().target for file in store.kept.files()] == [str(root / "y")]


@pytest.mark.parametrize("options", [{"memory": "/dev/shm"}, {"drain_limit": 1}, {"idle_timeout": 1}])
def test_what_is_the_nodes_is_refused_for_a_root(options: dict[str, Any], store: FilesDir, root: Path) -> None:
    with pytest.raises(rekindle.UsageError, match="the rest is the node's"):
        rekindle.files.configure(root, **options)


@pytest.mark.parametrize("options", [{"limit": 0}, {"when_full": "wait"}])
def test_settings_of_a_root_that_make_no_sense_are_refused(
    options: dict[str, Any], store: FilesDir, root: Path
) -> None:
    with pytest.raises(rekindle.UsageError):
        rekindle.files.configure(root, **options)
    assert rekindle.save(b"x", root / "x") == "memory"


@pytest.mark.parametrize(
    "options",
    [
        {"limit": 0},
        {"limit": "lots"},
        {"when_full": "wait"},
        {"drain_limit": "fast"},
        {"idle_timeout": 0},
        {"idle_timeout": "soon"},
    ],
)
def test_settings_that_make_no_sense_are_refused(
    options: dict[str, object], store: FilesDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(rekindle.UsageError):
        rekindle.files.configure(**options)  # type: ignore[arg-type]
    ((name, value),) = options.items()
    monkeypatch.setenv(f"REKINDLE_FILES_{name.upper()}", str(value))
    with pytest.raises(rekindle.UsageError):
        rekindle.save(b"x", store.path / "x")
