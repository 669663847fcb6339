"""Defects that stores of this kind have had, one test each."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.agent.file_drain import FileDrainer
from rekindle.memory.files_dir import FilesDir
from rekindle.storage import disk
from tests.faults.harness import wait_for


class Fault:
    """Lets one function of the disk fail, so many times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, number: int, times: int) -> None:
        self.times, self.number, self.real = times, number, getattr(disk, name)
        monkeypatch.setattr(disk, name, self)

    def __call__(self, *arguments: Any) -> Any:
        if self.times:
            self.times -= 1
            raise OSError(self.number, os.strerror(self.number))
        return self.real(*arguments)


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("call", ["make_path", "create_new", "pwrite", "fsync", "rename", "sync"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_one_failed_upload_loses_the_file(
    call: str, number: int, drainer: FileDrainer, store: FilesDir, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its copy in memory, leaves the old file, and is tried again until it works."""
    path, clock = root / "x", Clock()
    rekindle.save(b"old", path)
    assert drainer.tick()
    drainer = FileDrainer(store, clock)
    Fault(monkeypatch, call, number, times=2)
    monkeypatch.setattr(disk, "open_direct", lambda fd: os.open("/nowhere", os.O_RDONLY))
    rekindle.save(b"new", path)
    for pause in (0.5, 1.0):
        assert not drainer.tick() and not drainer.tick()
        assert path.read_bytes() == b"old"
        assert rekindle.load(path) == b"new" and "x: " in (drainer.progress.error or "")
        assert os.listdir(root) == ["x"]
        clock.now += pause
    assert drainer.tick() and path.read_bytes() == b"new"
    assert drainer.progress.error is None and os.listdir(root) == ["x"]


def test_a_full_disk_loses_the_file(small_tmpfs: Callable[[int], Path], drainer: FileDrainer, store: FilesDir) -> None:
    """A real one, with the old file on it."""
    place = small_tmpfs(4 << 20)
    path, filler = place / "x", place / "filler"
    rekindle.save(b"old" * 300_000, path)
    assert drainer.tick()
    filler.write_bytes(bytes(2 << 20))
    saved = b"new" * 600_000
    rekindle.save(saved, path)
    drainer = FileDrainer(store, clock := Clock())
    assert not drainer.tick() and "No space left" in drainer.progress.failed[str(path)]
    store.notes.write_agent_status({"error": drainer.progress.error, "failed": drainer.progress.failed})
    with pytest.raises(rekindle.NotDurableError, match="No space left"):
        rekindle.flush(timeout=0)
    assert path.read_bytes() == b"old" * 300_000 and rekindle.load(path) == saved
    assert sorted(os.listdir(place)) == ["filler", "x"]
    filler.unlink()
    clock.now += 1
    assert drainer.tick() and path.read_bytes() == saved
    rekindle.flush(timeout=0)


def test_a_path_that_fails_holds_up_the_others(drainer: FileDrainer, root: Path) -> None:
    root.mkdir()
    rekindle.save(b"1", root / "gone" / "x")
    (root / "gone").write_bytes(b"a file in the way")
    rekindle.save(b"2", root / "y")
    assert drainer.tick() and (root / "y").read_bytes() == b"2"
    assert list(drainer.progress.failed) == [str(root / "gone" / "x")]


def test_flush_forgets_uploads_that_wait_for_their_retry(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    root.mkdir()
    rekindle.save(b"1", root / "gone" / "x")
    (root / "gone").write_bytes(b"a file in the way")
    assert not drainer.tick()
    store.notes.write_agent_status({"error": None, "failed": drainer.progress.failed})
    for path in (None, root / "gone" / "x"):
        with pytest.raises(rekindle.NotDurableError, match=r"gone/x: .*see that the path is right"):
            rekindle.flush(path, timeout=0.1)


def test_flush_is_true_after_the_server_has_died_with_the_data(drainer: FileDrainer, store: FilesDir, root: Path):
    rekindle.save(b"1", root / "x")
    shutil.rmtree(store.kept_path)
    with pytest.raises(rekindle.NotDurableError, match="was removed"):
        rekindle.flush(timeout=0.1)


def test_flush_takes_a_placeholder_for_the_file(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    rekindle.save(b"1", root / "x", placeholder=True)
    (file,) = store.kept.files()
    store.kept.remove(file)  # as on another node
    with pytest.raises(rekindle.NotDurableError, match="is a placeholder"):
        rekindle.flush(root / "x", timeout=0.1)


def test_a_file_that_was_removed_on_its_way_comes_back(drainer: FileDrainer, root: Path) -> None:
    """A program that keeps so many files removes what it sees: the placeholder."""
    rekindle.save(b"1", root / "x", placeholder=True)
    (root / "x").unlink()
    assert not drainer.tick() and os.listdir(root) == [] and rekindle.files.status() == []
    rekindle.save(b"2", root / "x", placeholder=True)
    shutil.rmtree(root)
    assert drainer.tick() and (root / "x").read_bytes() == b"2", "a directory that is gone says nothing of its files"


def test_flush_returns_while_storage_hangs(
    drainer: FileDrainer, store: FilesDir, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()
    real = disk.fsync
    monkeypatch.setattr(disk, "fsync", lambda fd: (hangs.wait(60), real(fd)))
    rekindle.save(b"1", root / "x")
    upload = threading.Thread(target=drainer.tick)
    upload.start()
    with pytest.raises(rekindle.NotDurableError, match="storage is slow, or hangs"):
        rekindle.flush(timeout=0.3)
    assert not (root / "x").exists()
    hangs.set()
    upload.join()
    rekindle.flush(timeout=60)
    assert (root / "x").read_bytes() == b"1"


def test_the_result_of_the_commit_is_ignored(
    drainer: FileDrainer, store: FilesDir, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit into memory that fails is no save into memory."""
    rekindle.save(b"old", root / "x")
    rekindle.files.configure(when_full="error")

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr("rekindle.memory.kept.write_atomic", full)
        with pytest.raises(rekindle.MemoryStoreError, match="No space left"):
            rekindle.save(b"new", root / "x")
    assert rekindle.load(root / "x") == b"old"
    assert len(list(store.kept_path.glob("*.*"))) == 2 and list(store.paths.slots.iterdir()) == []


def test_a_failed_read_gives_uninitialised_tensors(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    rekindle.save({"x": torch.ones(300_000)}, root / "x.pt")
    (file,) = store.kept.files()
    os.truncate(file.data, 500_000)
    with pytest.raises(rekindle.CorruptError, match="has 500,000 bytes"):
        rekindle.load(root / "x.pt")


def test_a_reader_sees_a_torn_file(drainer: FileDrainer, root: Path) -> None:
    """Each read finds one whole save or another, whatever it meets."""
    path, over = root / "x", threading.Event()
    rekindle.save(b"0" * 3_000_000, path)
    assert drainer.tick()
    torn: list[set[int]] = []

    def read() -> None:
        while not over.is_set():
            data = path.read_bytes()
            if len(data) != 3_000_000 or data.count(data[:1]) != len(data):
                torn.append(set(data))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(20):
        rekindle.save(b"%d" % (number % 10) * 3_000_000, path)
        assert drainer.tick()
    over.set()
    for reader in readers:
        reader.join()
    assert torn == []


def test_a_shorter_file_leaves_the_rest_of_the_longer(drainer: FileDrainer, root: Path) -> None:
    path = root / "latest_checkpointed_iteration.txt"
    for text in (b"release", b"1000", b"900", b""):
        rekindle.save(text, path)
        assert drainer.tick() and path.read_bytes() == text == rekindle.load(path)


def test_empty_tensors_are_refused(drainer: FileDrainer, root: Path) -> None:
    rekindle.save({"empty": torch.empty(0), "also": torch.empty(3, 0, dtype=torch.int64)}, root / "x.pt")
    assert rekindle.load(root / "x.pt")["also"].shape == (3, 0)
    assert drainer.tick() and torch.load(root / "x.pt", weights_only=True)["empty"].numel() == 0


def test_a_save_that_fails_hangs_the_next(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    class Unpicklable:
        def __reduce__(self) -> Any:
            raise RuntimeError("can't be pickled")

    with pytest.raises(RuntimeError, match="can't be pickled"):
        rekindle.save({"x": torch.ones(3), "bad": Unpicklable()}, root / "x.pt")
    rekindle.save({"x": torch.ones(3)}, root / "x.pt")
    assert drainer.tick()
    rekindle.flush(timeout=5)
    assert list(store.paths.slots.iterdir()) == []


@pytest.mark.campaign(seconds=20)
def test_more_than_a_thousand_files(drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "fsync", lambda fd: None)
    monkeypatch.setattr(disk, "sync", lambda path: None)
    for number in range(1100):
        rekindle.save(b"%d" % number, root / str(number))
    while drainer.tick():
        pass
    rekindle.flush(timeout=5)
    assert {int((root / name).read_bytes()) for name in os.listdir(root)} == set(range(1100))


@pytest.mark.campaign(10)
def test_more_than_thirty_two_programs(store: FilesDir, root: Path) -> None:
    """All of them alive at a time."""
    code = "import sys, rekindle; rekindle.save(b'data', sys.argv[1]); print('saved', flush=True); sys.stdin.read()"
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", code, root / str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for number in range(40)
    ]
    try:
        for program in programs:
            assert program.stdout is not None and program.stdout.readline() == b"saved\n"
        assert len(store.trainers()) == 40
        rekindle.flush(timeout=120)
        assert len(os.listdir(root)) == 40
    finally:
        for program in programs:
            program.communicate(timeout=60)


def test_the_import_changes_torch(memory: Path, tmp_path: Path) -> None:
    look = "dict(vars(torch.Tensor)), list(sys.path), torch.save, torch.load"
    code = (
        f"import sys, torch\nmethods, *before = {look}\nimport rekindle\n"
        f"rekindle.save([torch.ones(2)], {str(tmp_path / 'x')!r}); rekindle.load({str(tmp_path / 'x')!r})\n"
        f"after, *now = {look}\n"
        "assert now == before and all(after[name] is method for name, method in methods.items())\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_an_agent_that_can_not_start_leaves_a_second_trainer(store: FilesDir, root: Path, no_agent: None) -> None:
    """Or keeps anything from arriving: this process carries its files itself."""
    pid = os.getpid()
    rekindle.save(b"data", root / "x")
    rekindle.flush(timeout=60)
    assert os.getpid() == pid and (root / "x").read_bytes() == b"data"


def test_a_failed_preload_keeps_later_loads_waiting(
    drainer: FileDrainer, store: FilesDir, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.mkdir()
    torch.save({"step": 1}, root / "x.pt")
    sound = (root / "x.pt").read_bytes()
    (root / "x.pt").write_bytes(sound[:-100])
    with pytest.raises(rekindle.CorruptError):
        rekindle.files.preload(root / "x.pt")
    assert rekindle.files.status() == [] and list(store.paths.slots.iterdir()) == []
    (root / "x.pt").write_bytes(sound)
    began = time.monotonic()
    assert rekindle.load(root / "x.pt") == {"step": 1} and time.monotonic() - began < 10
    rekindle.files.preload(root / "x.pt")
    assert len(rekindle.files.status()) == 1


def test_others_can_read_or_change_what_is_in_memory(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    rekindle.save(b"secret", root / "x")
    for path in (store.path, store.kept_path, store.paths.slots, store.path.parent):
        assert path.stat().st_mode & 0o077 == 0


def test_nobody_is_told_that_a_file_has_not_arrived(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    root.mkdir()
    rekindle.save(b"1", root / "gone" / "x")
    (root / "gone").write_bytes(b"a file in the way")
    rekindle.save(b"2", root / "y")
    assert drainer.tick()
    store.notes.write_agent_status({"error": None, "failed": drainer.progress.failed})
    found = {Path(file.path).name: (file.state, file.problem is None) for file in rekindle.files.status()}
    assert found == {"x": ("memory", False), "y": ("both", True)}


def test_a_mount_that_is_gone_is_written_below(
    disk_at: Path, mounted_again: Callable[[], None], drainer: FileDrainer, root: Path
) -> None:
    rekindle.save(b"data", disk_at / "run" / "x")
    subprocess.run(["umount", "-l", str(disk_at)], check=True)
    assert not drainer.tick() and "not mounted" in (drainer.progress.error or "")
    assert os.listdir(disk_at) == []
    mounted_again()
    wait_for(lambda: drainer.tick(), timeout=30)
    assert (disk_at / "run" / "x").read_bytes() == b"data"


@pytest.fixture
def disk_at(small_tmpfs: Callable[[int], Path]) -> Path:
    path = small_tmpfs(1 << 20)
    (path / "run").mkdir()
    return path


@pytest.fixture
def mounted_again(disk_at: Path, tmp_path: Path) -> Iterator[Callable[[], None]]:
    other = tmp_path / "other"
    other.mkdir()
    subprocess.run(["mount", "--bind", str(disk_at), str(other)], check=True)
    yield lambda: subprocess.run(["mount", "--bind", str(other), str(disk_at)], check=True) and None
    subprocess.run(["umount", "-l", str(other)], check=True)


def test_a_directory_that_was_removed_is_made_again(store: FilesDir, drainer: FileDrainer, root: Path) -> None:
    root.mkdir()
    rekindle.save(b"data", root / "x")
    shutil.rmtree(root)
    assert drainer.tick() and (root / "x").read_bytes() == b"data"
