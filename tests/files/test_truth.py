"""What is said to be on storage is there, and what was saved is not lost to other saves or a careless hand."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import rekindle
from rekindle.agent import file_drain
from rekindle.agent.file_drain import FileDrainer
from rekindle.cli.main import main
from rekindle.files.client import Client
from rekindle.memory.files_dir import FilesDir
from rekindle.memory.kept import OpenFile
from rekindle.storage.path_place import PathPlace
from rekindle.storage.place import Place


def test_a_write_to_storage_takes_no_newer_file_out_of_memory(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = root / "x", PathPlace.write_stream

    def slowly(self: PathPlace, chunks: Iterator[memoryview], nbytes: int) -> Any:
        assert rekindle.save(b"newer", path) == "memory"
        return real(self, chunks, nbytes)

    rekindle.save(b"older", path)
    rekindle.files.configure(limit=100_000)
    monkeypatch.setattr(PathPlace, "write_stream", slowly)
    assert rekindle.save(bytes(200_000), path) == "storage"
    assert rekindle.load(path) == b"newer"
    assert drainer.tick() and path.read_bytes() == b"newer"


def test_a_file_that_somebody_removed_from_memory_is_told_of(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    rekindle.save(b"lost", root / "x")
    rekindle.save(b"data", root / "y")
    store.kept.files()[0].data.unlink()
    store.sweep()
    assert drainer.tick() and (root / "y").read_bytes() == b"data"
    with pytest.raises(rekindle.NotDurableError, match="x"):
        rekindle.flush(timeout=0)
    with pytest.raises(rekindle.CorruptError, match="removed"):
        rekindle.load(root / "x")
    rekindle.save(b"again", root / "x")
    assert drainer.tick() and (root / "x").read_bytes() == b"again"
    rekindle.flush(timeout=0)


def test_all_files_that_somebody_removed_from_memory_are_told_of(
    drainer: FileDrainer, store: FilesDir, root: Path
) -> None:
    rekindle.save(b"lost", root / "x")
    shutil.rmtree(store.kept_path)
    with pytest.raises(rekindle.NotDurableError, match="was removed"):
        rekindle.flush(timeout=0)
    rekindle.save(b"data", root / "y")
    assert drainer.tick()
    rekindle.flush(timeout=0)


def test_a_placeholder_that_stands_for_two_saves_is_removed_with_both(drainer: FileDrainer, root: Path) -> None:
    for data in (b"1", b"2"):
        rekindle.save(data, root / "x", placeholder=True)
    (root / "x").unlink()
    assert not drainer.tick() and list(root.iterdir()) == [] and rekindle.files.status() == []


def test_a_save_that_fails_leaves_the_placeholder_of_the_one_before(drainer: FileDrainer, root: Path) -> None:
    rekindle.save(b"1", root / "x", placeholder=True)
    rekindle.files.configure(limit=100_000, when_full="error")
    with pytest.raises(rekindle.MemoryStoreError):
        rekindle.save(bytes(200_000), root / "x", placeholder=True)
    assert drainer.tick() and (root / "x").read_bytes() == b"1"


def test_a_flush_does_not_say_that_what_was_removed_meanwhile_is_on_storage(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rekindle.save(b"1", root / "x", placeholder=True)

    def remove(self: Client) -> None:
        (root / "x").unlink(missing_ok=True)
        assert not drainer.tick()

    monkeypatch.setattr(Client, "look", remove)
    with pytest.raises(rekindle.NotFoundError):
        rekindle.flush(root / "x", timeout=60)


def test_an_error_that_nobody_foresaw_holds_up_no_other_file(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = file_drain.carry

    def fail(opened: OpenFile, place: Place, *others: Any) -> Any:
        if place.target.endswith("/x"):
            raise RuntimeError("can't start new thread")
        return real(opened, place, *others)

    monkeypatch.setattr(file_drain, "carry", fail)
    rekindle.save(b"x", root / "x")
    rekindle.save(b"y", root / "y")
    assert drainer.tick() and (root / "y").read_bytes() == b"y"
    assert "can't start new thread" in drainer.progress.failed[str(root / "x")]


def test_the_command_flush_does_not_say_that_what_is_nowhere_is_on_storage(
    drainer: FileDrainer, store: FilesDir, root: Path
) -> None:
    rekindle.save(b"data", root / "x", placeholder=True)
    (file,) = store.kept.files()
    store.kept.remove(file)  # as on another node
    for path, code in ((root / "y", 3), (root / "x", 8)):
        done = CliRunner().invoke(main, ["flush", str(path)])
        assert done.exit_code == code and "on storage" not in done.stdout, done.output


def test_the_command_flush_refuses_a_time_that_is_none(drainer: FileDrainer, root: Path) -> None:
    rekindle.save(b"data", root / "x")
    done = CliRunner().invoke(main, ["flush", "--timeout", "nan"])
    assert done.exit_code == 2 and "timeout" in done.output


def test_hundreds_of_files_go_for_one_in_few_looks(
    drainer: FileDrainer, store: FilesDir, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look lists all files, under the lock for which every other save waits ten seconds at most."""
    for number in range(100):
        rekindle.save(bytes(5000), root / str(number))
    while drainer.pending():
        drainer.tick()
    looks, real = itertools.count(), FilesDir.spoken_for

    def look(self: FilesDir) -> tuple[int, int]:
        next(looks)
        return real(self)

    monkeypatch.setattr(FilesDir, "spoken_for", look)
    rekindle.files.configure(limit=100 * 8192 + 100 * 8192 + 500_000)
    assert rekindle.save(bytes(2_000_000), root / "large") == "memory"
    assert len(rekindle.files.status()) < 60 and next(looks) < 12
