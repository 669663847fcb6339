"""A file that takes the place of a placeholder: it is newer than the one that was on its way there."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest

import rekindle
from rekindle.agent.file_drain import FileDrainer
from rekindle.files import client as clients
from rekindle.files import saving
from rekindle.memory import kept
from rekindle.memory.files_dir import FilesDir
from rekindle.memory.kept import key_of
from rekindle.storage import disk
from rekindle.storage.path_place import PathPlace
from tests.files.test_interrupted import once
from tests.files.test_renaming import found, save, settle


def straight(path: Path, data: bytes) -> None:
    pool = clients.the_client()._pool
    pool._limit = 1
    assert rekindle.save(data, path, placeholder=True) == "storage"
    pool._limit = None


def test_by_a_rename_of_one_that_was_written_straight_to_storage(drainer: FileDrainer, root: Path) -> None:
    save(root / "tmp", b"older")
    os.rename(root / "tmp", root / "latest")
    straight(root / "tmp", b"newer")  # which lets the older one belong at its new name
    os.rename(root / "tmp", root / "latest")
    assert rekindle.load(root / "latest", raw=True) == b"newer"
    settle(drainer)
    assert found(root) == {"latest": b"newer"} and rekindle.load(root / "latest", raw=True) == b"newer"


def test_by_any_other_program(drainer: FileDrainer, root: Path) -> None:
    save(root / "x", b"older")
    (root / "new").write_bytes(b"newer")
    os.rename(root / "new", root / "x")
    settle(drainer)
    assert found(root) == {"x": b"newer"}


def test_while_the_older_one_is_written(drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(root / "x", b"older")
    (root / "new").write_bytes(b"newer")
    once(monkeypatch, FileDrainer, "_count", lambda: os.rename(root / "new", root / "x"))
    settle(drainer)
    assert found(root) == {"x": b"newer"}


def test_not_by_the_file_of_the_save_before(
    drainer: FileDrainer, store: FilesDir, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which arrives while the newer one, that was promised the same placeholder, is copied into memory."""
    save(root / "x", b"older")
    done: list[bool] = []

    def arrive() -> None:
        done.append(drainer.tick())
        for file in store.kept.newest(stored=True):  # as memory is full
            store.kept.remove(file)
        store.kept.sweep()

    once(monkeypatch, clients.Client, "keep", arrive)
    save(root / "x", b"newer")
    assert done == [True] and (root / "x").read_bytes() == b"older" and rekindle.load(root / "x") == b"newer"
    drainer = FileDrainer(store)  # of the next agent
    settle(drainer)
    assert found(root) == {"x": b"newer"}


def test_not_by_one_that_another_thread_writes_straight_to_storage_meanwhile(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root / "x", b"oldest")
    store = clients.the_client().store

    def write() -> None:
        place = PathPlace(root / "x", store.id())
        clients.write_in_turn(store, place, clients.Contents("bytes", 0, []))

    once(monkeypatch, clients.Client, "keep", write)
    save(root / "x", b"newest")
    settle(drainer)
    assert found(root) == {"x": b"newest"}


def test_an_older_one_that_was_renamed_to_a_path_never_follows_what_is_written_straight_there(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root / "tmp", b"older")
    os.rename(root / "tmp", root / "latest")
    shutil.copy(root / "latest", root / "copy")
    ticks: list[threading.Thread] = []

    def tick() -> None:
        ticks.append(threading.Thread(target=drainer.tick))  # another thread, as its turn is another lock
        ticks[0].start()
        ticks[0].join()

    once(monkeypatch, PathPlace, "write_stream", tick)
    straight(root / "latest", b"newer")
    settle(drainer)
    assert (root / "latest").read_bytes() == b"newer"


def test_what_is_written_straight_over_a_copy_of_a_placeholder_gives_up_nothing(
    drainer: FileDrainer, root: Path
) -> None:
    save(root / "x", b"data")
    shutil.copy(root / "x", root / "copy")
    straight(root / "copy", b"other")
    settle(drainer)
    assert found(root) == {"x": b"data", "copy": b"other"}


def test_what_is_known_of_paths_goes_after_an_hour(
    drainer: FileDrainer, store: FilesDir, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root / "x", b"data")
    settle(drainer)
    key = key_of(str(root / "x"))
    monkeypatch.setattr(kept, "_LONGEST_SAVE", -1.0)
    store.kept.sweep()
    assert store.kept.placed(key), "its file is in memory"
    store.kept.remove(store.kept.files()[0])
    store.kept.sweep()
    assert not store.kept.placed(key)


def test_by_one_that_is_saved_there_after_a_rename(drainer: FileDrainer, root: Path) -> None:
    """Which is no reason to look for the placeholder no more."""
    save(root / "x", b"older")
    os.rename(root / "x", root / "y")
    (root / "x").write_bytes(b"newer")
    settle(drainer)
    assert found(root) == {"x": b"newer", "y": b"older"}


def test_the_placeholder_of_a_newer_file_comes_while_an_older_one_is_written(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rekindle.save(b"older", root / "latest")  # without a placeholder
    save(root / "tmp", b"newer")
    once(monkeypatch, FileDrainer, "_count", lambda: os.rename(root / "tmp", root / "latest"))
    settle(drainer)
    assert found(root) == {"latest": b"newer"}


def test_a_rename_that_fails_leaves_the_newer_file_in_memory(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this node was about to put at the path is not there, and what it had put there before is."""
    save(root / "x", b"older")
    once(monkeypatch, FileDrainer, "_count", lambda: save(root / "x", b"newer"))  # on the same placeholder
    drainer.tick()
    assert found(root) == {"x": b"older"}

    def fail(old: Path, new: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(new))

    with monkeypatch.context() as patch:
        patch.setattr(disk, "rename", fail)
        drainer.tick()
    assert drainer.progress.failed and rekindle.load(root / "x") == b"newer"
    drainer._failures.clear()  # instead of the pause until the next attempt
    settle(drainer)
    assert found(root) == {"x": b"newer"}


def test_two_files_of_one_path_whose_directory_is_removed(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    """The older one, which is aside, is given up; the newer one's placeholder was removed, so it is, too."""
    for name in ("a", "b"):
        save(root / "there" / name, name.encode())
    os.rename(root / "there" / "a", root / "there" / "b")
    drainer.tick()  # lets a belong where b did, whose placeholder is gone
    shutil.rmtree(root / "there")
    settle(drainer)
    assert len(store.kept.newest()) <= 1


def test_a_file_that_storage_has_does_not_count_as_newer(drainer: FileDrainer, root: Path) -> None:
    save(root / "tmp", b"newer")
    rekindle.save(b"old", root / "final")
    for file in drainer._store.kept.newest(stored=False):
        if file.read_receipt().target == str(root / "final"):
            drainer._carry(file)
    os.rename(root / "tmp", root / "final")
    settle(drainer)
    assert found(root) == {"final": b"newer"}


def test_one_that_is_set_aside_is_no_newer_than_it_was(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    save(root / "tmp", b"older")
    os.rename(root / "tmp", root / "final")
    rekindle.save(b"newer", root / "final")
    (older,) = [file for file in store.kept.files() if file.read_receipt().target == str(root / "tmp")]
    store.set_aside(older)  # as by a save to tmp while storage did not answer
    settle(drainer)
    assert found(root) == {"final": b"newer"}


def test_a_newer_file_arrives_whose_placeholder_the_older_one_has_replaced_and_that_was_renamed(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rename takes the older file along, which is at the path, as where a file stood from the start."""
    save(root / "tmp", b"older")
    once(monkeypatch, clients.Client, "keep", drainer.tick)
    save(root / "tmp", b"newer")
    assert (root / "tmp").read_bytes() == b"older"
    os.rename(root / "tmp", root / "latest")
    assert rekindle.load(root / "tmp") == b"newer"
    settle(drainer)
    assert found(root) == {"latest": b"older", "tmp": b"newer"}


def test_a_placeholder_that_a_failed_save_takes_away_is_not_one_that_was_removed(
    drainer: FileDrainer, store: FilesDir, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another save counts on it, and is not in memory yet."""
    place = PathPlace(root / "x", "another")
    assert place.put_placeholder("on its way", "0" * 16)
    once(monkeypatch, clients.Client, "keep", lambda: saving._take_away(store, place, "0" * 16))
    rekindle.save(b"data", root / "x")
    settle(drainer)
    assert found(root) == {"x": b"data"}
