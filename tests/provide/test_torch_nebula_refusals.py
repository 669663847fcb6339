"""The stand-in for torch_nebula: names and settings that are refused, memory that is full."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rekindle
from rekindle.agent.file_drain import FileDrainer
from rekindle.memory.files_dir import FilesDir
from rekindle.provide import torch_nebula as tn
from rekindle.provide.torch_nebula import settings
from tests.provide.nebula import is_ok, same, save, settle


@pytest.mark.parametrize("tag", ["a/b", "..", "."])
def test_a_tag_is_the_name_of_a_folder(tag: str, root: Path) -> None:
    tn.init(root)
    with pytest.raises(rekindle.UsageError, match="tag"):
        tn.Checkpoint(tag)


@pytest.mark.parametrize("number", ["4", None, 2.0])
def test_a_number_of_files_is_an_integer(number: object, root: Path) -> None:
    """Or nothing could tell, after the first save, when the checkpoint is complete."""
    tn.init(root)
    with pytest.raises(TypeError, match="integer"):
        tn.Checkpoint("a", number)


@pytest.mark.parametrize("name", ["", "a/b", "..", "complete.txt", ".rekindle-1-x.json"])
def test_a_partition_is_the_name_of_a_file(name: str, store: FilesDir, root: Path) -> None:
    tn.init(root)
    with pytest.raises(rekindle.UsageError, match="partition"):
        tn.Checkpoint("a").save(name, 1)
    assert not root.exists() and not store.kept.files()


@pytest.mark.parametrize(
    "given",
    [
        {"persistent_storage_path": "s3://bucket/x"},
        {"persistent_time_interval": -1},
        {"persistent_time_interval": "often"},
        {"num_of_version_in_retention": 0},
    ],
)
def test_settings_are_checked(given: dict[str, object]) -> None:
    with pytest.raises(rekindle.UsageError):
        tn.init(**given)


def test_settings_come_from_the_environment(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEBULA_PERSISTENT_STORAGE_PATH", str(root))
    monkeypatch.setenv("NEBULA_PERSISTENT_TIME_INTERVAL", "7")
    monkeypatch.setenv("NEBULA_MEMORY_BUFFER_SIZE", "123456789")
    monkeypatch.setenv("REKINDLE_FILES_LIMIT", "")
    monkeypatch.delenv("REKINDLE_FILES_LIMIT")
    found = settings.current_nebula()
    assert (found.root, found.interval, found.retention) == (str(root), 7.0, 2)
    assert rekindle.files.settings.current_settings().limit == 123456789


def test_where_memory_is_full_a_checkpoint_goes_straight_to_storage(
    store: FilesDir, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REKINDLE_FILES_LIMIT", "1")
    tn.init(root, 1000)
    for seed in range(2):  # the second one would wait in memory
        save(f"s{seed}", seed)
        assert is_ok(root, f"s{seed}")
        assert same(torch.load(root / f"s{seed}" / "optim.pt", weights_only=True), seed)
    assert not store.kept.files()


def test_without_a_path_full_memory_is_an_error(store: FilesDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_FILES_LIMIT", "1")
    tn.init()
    with pytest.raises(rekindle.MemoryStoreError):
        tn.Checkpoint("a", -2).save("x", 1)
    assert tn.Checkpoint("a", -2).commit() is False


def test_a_save_that_finds_no_room_leaves_the_checkpoint_of_that_tag_in_memory(
    drainer: FileDrainer, root: Path
) -> None:
    tn.init(root, 0)
    save("a", 1)
    rekindle.files.configure(root, limit=1, when_full="error")
    with pytest.raises(rekindle.MemoryStoreError):
        save("a", 2)
    found = tn.get_checkpoint("a")
    assert found is not None and same(found.load("model.pt"), 1)


def test_a_partition_that_finds_no_room_leaves_the_checkpoint_of_that_tag_on_storage(
    drainer: FileDrainer, root: Path
) -> None:
    tn.init(root, 0)
    save("a", 1)
    settle(drainer)
    rekindle.files.configure(root, limit=2000, when_full="error")  # there is room for the voucher that comes first
    with pytest.raises(rekindle.MemoryStoreError):
        save("a", 2)
    settle(drainer)
    found = tn.get_checkpoint("a")
    assert is_ok(root, "a") and found is not None and same(found.load("model.pt"), 1)
