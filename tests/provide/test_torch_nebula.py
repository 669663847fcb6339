"""The stand-in for torch_nebula, by one process: what is complete when, what gets to storage, what stays."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.agent.file_drain import FileDrainer
from rekindle.memory.files_dir import FilesDir
from rekindle.provide import torch_nebula as tn
from rekindle.provide.torch_nebula import catalog, keeping, settings
from rekindle.provide.torch_nebula import checkpoint as checkpoints
from tests.faults.harness import wait_for
from tests.files.programs import run
from tests.fork_server import run_and_kill
from tests.provide.nebula import is_ok, same, save, settle, state, tags


def test_a_persistent_checkpoint_is_a_folder_of_plain_files(store: FilesDir, root: Path) -> None:
    tn.init(str(root), 100, 2)
    save("global_step1", 1)
    assert tn.flush_persistence() is True
    assert tags(root) == ["global_step1"] and is_ok(root, "global_step1")
    for name in ("model.pt", "optim.pt"):
        assert same(torch.load(root / "global_step1" / name, weights_only=True), 1)
    assert json.loads(json.dumps(tn.list_checkpoints()))["global_step1"]["partitions"] == ["model.pt", "optim.pt"]
    path = tn.get_latest_checkpoint_path("model.pt", root)
    assert path == str(root / "global_step1" / "model.pt")


def test_a_save_waits_for_no_storage_and_is_loaded_from_memory(drainer: FileDrainer, root: Path) -> None:
    tn.init(root)
    save("a", 1)
    assert not root.exists()
    latest = tn.get_latest_checkpoint(persist_path=root)
    assert latest is not None and latest.tag == "a"
    assert same(latest.load("model.pt"), 1)
    found = tn.get_checkpoint(tag="a")
    assert found is not None and same(found.load("optim.pt", map_location=torch.device("cpu")), 1)


def test_complete_comes_last_whatever_fails_before(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    (root / "a" / "model.pt").mkdir(parents=True)  # storage refuses this one
    tn.init(root)
    with pytest.raises(rekindle.UsageError):
        save("a", 1, "model.pt")
    (root / "a" / "model.pt").rmdir()
    now = [0.0]
    slow = FileDrainer(store, clock=lambda: now[0])
    save("a", 1)
    (root / "a" / "model.pt").mkdir()
    settle(slow)
    assert (root / "a" / "optim.pt").exists() and not is_ok(root, "a")
    assert tn.list_checkpoints()["a"] | {"version": 0} == {
        "complete": True,
        "persisted": False,
        "partitions": ["model.pt", "optim.pt"],
        "version": 0,
    }
    (root / "a" / "model.pt").rmdir()
    now[0] = 100.0
    settle(slow)
    assert is_ok(root, "a") and tn.list_checkpoints()["a"]["persisted"] is True


def test_a_flush_is_true_only_when_all_is_durable(
    drainer: FileDrainer, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tn.init(root)
    assert tn.flush_persistence(timeout=1) is False, "there is nothing"
    save("a", 1)
    (root / "a" / "model.pt").mkdir(parents=True)
    settle(drainer)
    assert tn.flush_persistence(timeout=0.2) is False
    assert "model.pt" in caplog.text
    (root / "a" / "model.pt").rmdir()
    wait_for(lambda: drainer.tick() or is_ok(root, "a"))
    assert tn.flush_persistence(timeout=5) is True


def test_an_incomplete_checkpoint_is_not_flushed(drainer: FileDrainer, root: Path, caplog) -> None:
    tn.init(root)
    tn.Checkpoint("a", -2).save("model.pt", state(1))
    settle(drainer)
    assert (root / "a" / "model.pt").exists()
    assert tn.flush_persistence(timeout=5) is False and "not complete: 'a'" in caplog.text
    assert tn.get_latest_checkpoint() is None


def test_an_unknown_tag_is_named_with_what_there_is(store: FilesDir, root: Path, caplog) -> None:
    tn.init(root)
    save("global_step5")
    tn.Checkpoint("global_step6", -2).save("model.pt", state(6))
    assert tn.get_checkpoint(tag="global_step7", persist_path=root) is None
    (line,) = [record.getMessage() for record in caplog.records if "global_step7" in record.getMessage()]
    assert "'global_step5'" in line and "not complete: 'global_step6'" in line


def test_only_so_many_versions_stay(store: FilesDir, root: Path) -> None:
    (root / "foreign").mkdir(parents=True)
    (root / "foreign" / "complete.txt").write_text("OK")
    (root / "other").mkdir()
    tn.init(root, 0, 2)
    tn.Checkpoint("never", -2).save("model.pt", state(0))  # its rank was killed before the commit, let us say
    for seed in range(4):
        save(f"s{seed}", seed)
        assert tn.flush_persistence() is True
    keeping.keep(settings.current_nebula())
    assert tags(root) == ["foreign", "other", "s2", "s3"]
    targets = {found.path for found in rekindle.files.status()}
    assert {Path(target).parent.name for target in targets} == {"s2", "s3"}


def test_a_tag_that_is_written_again_is_not_taken_for_the_old_one(drainer: FileDrainer, root: Path) -> None:
    """The look on which old checkpoints are removed is older than the new one of that tag."""
    tn.init(root, 0)
    save("a", 1)
    settle(drainer)
    seen = catalog.Catalog(str(root))
    again = tn.Checkpoint("a", -2)
    again.save("model.pt", state(2))
    settle(drainer)
    again.save("optim.pt", state(2))
    keeping.drop(settings.current_nebula(), seen, seen.found["a"])
    assert again.commit()
    settle(drainer)
    latest = tn.get_latest_checkpoint()
    assert latest is not None and same(latest.load("model.pt"), 2) and same(latest.load("optim.pt"), 2)
    assert is_ok(root, "a") and same(torch.load(root / "a" / "model.pt", weights_only=True), 2)


def test_checkpoints_that_come_fast_stay_in_memory_until_a_flush(drainer: FileDrainer, root: Path) -> None:
    tn.init(root, 1000, 2)
    for seed in range(4):
        save(f"s{seed}", seed)
        settle(drainer)
        keeping._keeping[str(root)].exception(60)
    keeping.keep(settings.current_nebula())
    assert tags(root) == ["s0"]
    latest = tn.get_latest_checkpoint()
    assert latest is not None and latest.tag == "s3"
    assert {tag for tag, found in tn.list_checkpoints().items() if found["complete"]} == {"s0", "s2", "s3"}
    tn.flush_persistence(timeout=0.1)
    settle(drainer)
    assert tn.flush_persistence(timeout=5) is True
    assert tags(root) == ["s0", "s3"] and is_ok(root, "s3")


@pytest.mark.campaign(seconds=9)
def test_what_came_fast_gets_to_storage_at_the_end_of_the_process(store: FilesDir, root: Path) -> None:
    code = (
        "from rekindle.provide import torch_nebula as tn\n"
        "tn.init(sys.argv[1], 1000)\n"
        "for n in range(3):\n"
        "    checkpoint = tn.Checkpoint(f's{n}', -2)\n"
        "    checkpoint.save('model.pt', {'n': n})\n"
        "    checkpoint.commit()\n"
    )
    assert run(code, root) == 0
    wait_for(lambda: is_ok(root, "s2"))
    assert torch.load(root / "s2" / "model.pt", weights_only=True) == {"n": 2}


def killed_after(work: Callable[..., object], *args: Any) -> None:
    """Does some work in another process, with the settings of this one. It is killed then."""
    settings = {name: value for name, value in os.environ.items() if name.startswith("REKINDLE_")}
    run_and_kill(with_settings, settings, work, *args)


def with_settings(variables: dict[str, str], work: Callable[..., object], *args: Any) -> None:
    os.environ.update(variables)
    work(*args)


def save_two(root: Path) -> None:
    """Saves two checkpoints. The second comes too soon for storage."""
    tn.init(root, 1000)
    for n in range(2):
        tn.Checkpoint(f"s{n}").save("model.pt", n)


def test_what_came_fast_gets_to_storage_when_memory_is_given_back(
    store: FilesDir, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REKINDLE_FILES_IDLE_TIMEOUT", "0.2")
    killed_after(save_two, root)
    wait_for(lambda: is_ok(root, "s1"))
    wait_for(lambda: not store.path.exists())
    assert tn.init(root) is None
    latest = tn.get_latest_checkpoint()
    assert latest is not None and latest.tag == "s1" and latest.load("model.pt") == 1


def save_in_memory() -> None:
    tn.init(None, num_of_version_in_retention=2)
    for seed in range(4):
        save(f"s{seed}", seed)
        keeping._keeping[settings.memory_root()].exception(60)
    keeping.keep(settings.current_nebula())


def test_without_a_path_checkpoints_stay_in_memory(store: FilesDir, root: Path, caplog) -> None:
    killed_after(save_in_memory)
    latest = tn.get_latest_checkpoint()
    assert latest is not None and latest.tag == "s3" and same(latest.load("model.pt"), 3)
    older = tn.get_checkpoint("s2")
    assert older is not None and same(older.load("optim.pt"), 2)
    assert tn.get_checkpoint("s1") is None
    assert tn.flush_persistence(timeout=1) is False and "no persistent_storage_path" in caplog.text
    assert not os.path.exists(settings.memory_root())
    rekindle.flush(timeout=1)  # waits for nothing that can't be carried


def test_what_came_fast_gets_to_storage_with_the_next_start(store: FilesDir, root: Path) -> None:
    killed_after(save_two, root)
    assert not is_ok(root, "s1")
    tn.init(root)
    wait_for(lambda: is_ok(root, "s1"))


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])
def test_memory_alone_is_for_ranks_of_one_node(name: str, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv(name, "2")
    with pytest.raises(rekindle.UsageError, match="on one node"):
        tn.init()
    tn.init(root)


def test_a_tag_that_is_written_again_is_incomplete_until_it_is_committed(drainer: FileDrainer, root: Path) -> None:
    tn.init(root, 0)
    save("a", 1)
    settle(drainer)
    assert is_ok(root, "a")
    again = tn.Checkpoint("a", -2)
    again.save("model.pt", state(2))
    assert tn.get_latest_checkpoint() is None, "a mixture would be loaded"
    settle(drainer)
    assert not is_ok(root, "a") and same(torch.load(root / "a" / "model.pt", weights_only=True), 2)
    again.save("optim.pt", state(2))
    assert again.commit()
    settle(drainer)
    assert is_ok(root, "a")
    found = tn.get_checkpoint("a")
    assert found is not None and same(found.load("optim.pt"), 2)


def test_the_version_written_before_is_not_declared_complete_over_the_new_one(drainer: FileDrainer, root: Path) -> None:
    tn.init(root, 0)
    save("a", 1)  # all of it is in memory yet
    tn.Checkpoint("a", -2).save("model.pt", state(2))
    settle(drainer)
    assert (root / "a" / "model.pt").exists() and not is_ok(root, "a")


def test_a_number_of_files_completes_a_checkpoint(drainer: FileDrainer, root: Path) -> None:
    tn.init(root, 0)
    checkpoint = tn.Checkpoint("a", 2)
    checkpoint.save("x", state(1))
    checkpoint.save("x", state(2))  # the same once more
    assert tn.get_checkpoint("a") is None
    checkpoint.save("y", state(2))
    settle(drainer)
    assert is_ok(root, "a") and tn.get_checkpoint("a") is not None


def test_without_a_number_each_save_completes_it_and_a_tag_is_drawn(drainer: FileDrainer, root: Path) -> None:
    tn.init(root, 0)
    checkpoint = tn.Checkpoint()
    for seed, name in enumerate(("x", "y")):
        checkpoint.save(name, state(seed))
        latest = tn.get_latest_checkpoint()
        assert latest is not None and latest.tag == checkpoint.tag and same(latest.load(name), seed)
    settle(drainer)
    assert is_ok(root, checkpoint.tag) and sorted(tags(root)) == [checkpoint.tag]


def test_a_save_that_failed_is_done_again_as_part_of_the_same_checkpoint(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks have agreed on it, and wait for this one."""
    agreed: dict[str, str] = {}
    monkeypatch.setattr(checkpoints, "agree", lambda key, value: agreed.setdefault(key, value))
    root.mkdir()
    (root / "a").write_text("a file in the way")
    tn.init(root, 0)
    checkpoint = tn.Checkpoint("a", -2)
    with pytest.raises(rekindle.UsageError):
        checkpoint.save("model.pt", state(1))
    (root / "a").unlink()
    checkpoint.save("model.pt", state(1))
    assert checkpoint.commit()
    (first, *_) = agreed.values()
    assert tn.list_checkpoints()["a"]["version"] == json.loads(first)[0]


def test_nodes_that_see_different_checkpoints_go_on_from_the_same(
    drainer: FileDrainer, root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tn.init(root, 0)
    save("a", 1)
    settle(drainer)
    save("b", 2)  # complete in this node's memory, and not yet on storage
    tn.Checkpoint("never", -2).save("model.pt", state(3))
    agreed: dict[str, str] = {}
    monkeypatch.setattr(checkpoints, "agree", lambda key, value: agreed.setdefault(key, value))
    found = []
    for place in (memory, memory / "of-a-new-node"):
        place.mkdir(exist_ok=True)
        monkeypatch.setenv("REKINDLE_MEMORY", str(place))
        catalog.Versions.newest = 0
        latest = tn.get_latest_checkpoint()
        found.append(latest and latest.tag)
    assert found == ["b", "b"]


def test_a_folder_that_may_not_be_read_hides_no_other(
    drainer: FileDrainer, store: FilesDir, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as lost+found, where storage is mounted."""
    tn.init(root, 0)
    save("a", 1)
    settle(drainer)
    for file in store.kept.files():
        store.kept.remove(file)
    (root / "lost+found").mkdir()
    (root / "odd" / "complete.txt").mkdir(parents=True)
    listdir = os.listdir

    def refuse(path: str) -> list[str]:
        if str(path).endswith("lost+found"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return listdir(path)

    monkeypatch.setattr(catalog.os, "listdir", refuse)
    latest = tn.get_latest_checkpoint()
    assert latest is not None and latest.tag == "a"


def test_checkpoints_of_another_program_are_found(store: FilesDir, root: Path) -> None:
    for age, tag in enumerate(("new", "old", "half")):
        (root / tag).mkdir(parents=True)
        torch.save(state(age), root / tag / "model.pt")
        path = root / tag / "complete.txt"
        path.write_text("OK" if tag != "half" else "")
        os.utime(path, (1000 - age, 1000 - age))
    tn.init(root)
    latest = tn.get_latest_checkpoint()
    assert latest is not None and latest.tag == "new" and same(latest.load("model.pt"), 0)
    assert tn.get_checkpoint("half") is None


def test_versions_grow_though_the_clock_goes_back(store: FilesDir, root: Path, monkeypatch) -> None:
    monkeypatch.setattr("rekindle.provide.torch_nebula.catalog.time.time_ns", lambda: 5000)
    folder = root / "a"
    folder.mkdir(parents=True)
    (folder / ".rekindle-9000-rank-0-of-1.json").write_text("{}")
    (folder / "complete.txt").write_text("OK")
    tn.init(root, 0)
    save("b")
    latest = tn.get_latest_checkpoint()
    assert latest is not None and latest.tag == "b"


def test_storage_that_hangs_leaves_what_is_in_memory(store: FilesDir, root: Path, monkeypatch, caplog) -> None:
    tn.init(root)
    save("a")
    monkeypatch.setattr(catalog.Catalog, "_look_at_storage", lambda self: threading.Event().wait())
    monkeypatch.setattr("rekindle.provide.torch_nebula.catalog._LOOK", 0.5)
    latest = tn.get_latest_checkpoint()
    assert latest is not None and latest.tag == "a" and "only checkpoints in memory are known" in caplog.text


def test_a_checkpoint_that_arrives_during_a_look_is_complete(drainer: FileDrainer, root: Path, monkeypatch) -> None:
    tn.init(root)
    save("a")
    keeping._keeping[str(root)].exception(60)  # it looks, too
    look = catalog.Catalog._look_at_storage

    def and_arrives(self):
        found = look(self)
        settle(drainer)
        return found

    monkeypatch.setattr(catalog.Catalog, "_look_at_storage", and_arrives)
    assert tn.get_checkpoint("a") is not None
    assert is_ok(root, "a")


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'NebulaDeepspeedStrategy'"):
        _ = tn.NebulaDeepspeedStrategy


def test_several_ranks_need_torch_distributed(store: FilesDir, root: Path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    tn.init(root)
    with pytest.raises(rekindle.UsageError, match="init_process_group"):
        tn.Checkpoint("a", -2).save("x", 1)
    assert tn.Checkpoint("a", -2).commit() is False and "init_process_group" in caplog.text


def test_a_checkpoint_that_somebody_removed_is_none(store: FilesDir, root: Path) -> None:
    tn.init(root)
    save("a")
    assert tn.flush_persistence() is True
    shutil.rmtree(root / "a")
    assert tn.get_checkpoint("a") is None and tn.get_latest_checkpoint() is None
