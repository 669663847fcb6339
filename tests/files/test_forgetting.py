"""A file that is to be forgotten never gets to its path, unless it is just being written there."""

from __future__ import annotations

from pathlib import Path

import pytest

import rekindle
from rekindle.agent.file_drain import FileDrainer
from rekindle.errors import NotFoundError
from rekindle.files.forgetting import forget, wait_for_writers
from rekindle.memory.files_dir import FilesDir
from rekindle.memory.kept import key_of


def test_a_forgotten_file_never_arrives(store: FilesDir, drainer: FileDrainer, root: Path) -> None:
    rekindle.save(b"old", root / "x")
    assert not forget(root / "x")
    rekindle.save(b"other", root / "y")
    assert drainer.tick()
    assert [file.name for file in root.iterdir()] == ["y"] and rekindle.load(root / "y") == b"other"
    with pytest.raises(NotFoundError):
        rekindle.load(root / "x")


def test_nothing_is_forgotten_where_nothing_is(store: FilesDir, root: Path) -> None:
    assert not forget(root / "x")
    assert not store.path.exists()


def test_a_file_that_is_being_written_is_told_of(store: FilesDir, drainer: FileDrainer, root: Path) -> None:
    rekindle.save(b"old", root / "x")
    turn = store.writing(key_of(str(root / "x")))
    assert turn.acquire()
    assert forget(root / "x")
    turn.release()
    with wait_for_writers(root / "x") as newer:
        assert not newer
    rekindle.save(b"newer", root / "x")
    with wait_for_writers(root / "x") as newer:
        assert newer
        assert not drainer.tick()  # nobody writes meanwhile
    assert drainer.tick() and (root / "x").read_bytes() == b"newer"
