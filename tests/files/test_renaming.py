"""A placeholder that the program renames before its file arrives: the file goes to the new name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.agent.file_drain import FileDrainer
from rekindle.files import client as clients
from rekindle.files.settings import FileSettings
from rekindle.format.file_receipt import BYTES, FileReceipt
from rekindle.format.receipt import checksum, seal
from rekindle.memory.files_dir import FilesDir
from rekindle.memory.kept import KeptFile
from rekindle.storage import disk, renaming
from rekindle.storage.path_place import PathPlace


def save(path: Path, data: bytes) -> None:
    assert rekindle.save(data, path, placeholder=True) == "memory"


def settle(drainer: FileDrainer, rounds: int = 5) -> None:
    for _ in range(rounds):
        drainer.tick()
    assert drainer.pending() is None and drainer.progress.failed == {}


def found(root: Path) -> dict[str, bytes]:
    """All files below, by their names."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_real_agent_carries_files_to_the_names_that_they_were_given_at_once(store: FilesDir, root: Path) -> None:
    """As programs do that save to a temporary name, which is the same each time."""
    for step in range(20):
        rekindle.save({"step": torch.full((50_000,), step)}, root / "model.tmp", placeholder=True)
        os.rename(root / "model.tmp", root / f"model-{step}.pt")
    rekindle.flush(root / "model-19.pt", timeout=60)
    assert torch.load(root / "model-19.pt", weights_only=True)["step"][0] == 19
    rekindle.flush(timeout=60)
    assert sorted(os.listdir(root)) == sorted(f"model-{step}.pt" for step in range(20))
    for step in range(20):
        assert torch.load(root / f"model-{step}.pt", weights_only=True)["step"].eq(step).all()


def test_it_is_found_in_memory_by_its_new_name_until_it_arrives(
    drainer: FileDrainer, store: FilesDir, root: Path
) -> None:
    rekindle.save(b"old", root / "latest")
    settle(drainer)
    save(root / "tmp", b"new")
    os.rename(root / "tmp", root / "latest")
    assert rekindle.load(root / "latest") == b"new"
    with pytest.raises(rekindle.NotDurableError, match="not on storage after"):
        rekindle.flush(root / "latest", timeout=0)
    drainer.tick()  # which lets the file belong there
    save(root / "tmp", b"newer")
    os.rename(root / "tmp", root / "latest")
    assert rekindle.load(root / "latest") == b"newer"
    settle(drainer)
    rekindle.flush(root / "latest", timeout=0)
    assert found(root) == {"latest": b"newer"} and rekindle.load(root / "latest") == b"newer"
    assert [(file.path, file.state) for file in rekindle.files.status()] == [(str(root / "latest"), "both")]


def test_a_name_that_is_saved_to_again_gives_up_none_that_was_renamed(drainer: FileDrainer, root: Path) -> None:
    for number in range(3):
        save(root / "tmp", b"%d" % number)
        os.rename(root / "tmp", root / f"x{number}")
    rekindle.save(b"3", root / "tmp")
    settle(drainer, 8)
    assert found(root) == {"x0": b"0", "x1": b"1", "x2": b"2", "tmp": b"3"}


def test_files_that_move_up_make_room_for_each_other(drainer: FileDrainer, root: Path) -> None:
    """As programs rotate their newest three, all of them still on their way."""
    for number in range(5):
        for place in (2, 1, 0):
            if (root / f"c.{place}").exists():
                os.rename(root / f"c.{place}", root / f"c.{place + 1}")
        save(root / "c.0", b"%d" % number)
    settle(drainer, 20)
    assert found(root) == {"c.0": b"4", "c.1": b"3", "c.2": b"2", "c.3": b"1"}


def test_two_that_change_places_both_arrive(drainer: FileDrainer, root: Path) -> None:
    save(root / "x", b"1")
    save(root / "y", b"2")
    for old, new in (("x", "z"), ("y", "x"), ("z", "y")):
        os.rename(root / old, root / new)
    assert rekindle.load(root / "x") == b"2" and rekindle.load(root / "y") == b"1"
    settle(drainer, 10)
    assert found(root) == {"x": b"2", "y": b"1"}


def test_the_newest_wins_whichever_name_it_had(drainer: FileDrainer, root: Path) -> None:
    rekindle.save(b"1", root / "x")  # without a placeholder
    save(root / "tmp", b"2")
    os.rename(root / "tmp", root / "x")
    settle(drainer)
    assert found(root) == {"x": b"2"}
    save(root / "tmp", b"3")
    os.rename(root / "tmp", root / "x")
    rekindle.save(b"4", root / "x")
    settle(drainer)
    assert found(root) == {"x": b"4"}
    save(root / "tmp", b"5")
    os.rename(root / "tmp", root / "x")
    save(root / "x", b"6")  # on the placeholder of the one before
    os.rename(root / "x", root / "y")
    settle(drainer)
    assert found(root) == {"y": b"6"}


@pytest.mark.parametrize("to", ["run/final/a.pt", "final/a.pt", "a.pt"])
def test_into_another_directory(drainer: FileDrainer, tmp_path: Path, to: str) -> None:
    (tmp_path / "run").mkdir()
    save(tmp_path / "run" / "a.pt", b"data")
    (tmp_path / to).parent.mkdir(exist_ok=True)
    os.rename(tmp_path / "run" / "a.pt", tmp_path / to)
    settle(drainer)
    assert found(tmp_path) == {to: b"data"}


def test_with_its_directory(drainer: FileDrainer, root: Path) -> None:
    """As transformers does: tmp-checkpoint-7 becomes checkpoint-7."""
    for name in ("a.pt", "b.pt"):
        save(root / "tmp-7" / name, name.encode())
    os.rename(root / "tmp-7", root / "checkpoint-7")
    settle(drainer)
    assert found(root) == {"checkpoint-7/a.pt": b"a.pt", "checkpoint-7/b.pt": b"b.pt"}


def test_one_that_was_removed_does_not_come_nor_does_its_copy_become_another(drainer: FileDrainer, root: Path) -> None:
    save(root / "x", b"1")
    save(root / "y", b"2")
    shutil.copy(root / "y", root / "copy")
    os.unlink(root / "x")
    drainer.tick()
    assert found(root).keys() == {"y", "copy"} and (root / "y").read_bytes() == b"2"
    save(root / "x", b"3")
    os.unlink(root / "x")
    save(root / "x", b"4")
    settle(drainer)
    assert (root / "x").read_bytes() == b"4"


def once(act: Callable[[], object], then: Callable[..., Any]) -> Callable[..., Any]:
    left = [act]

    def call(*args: Any, **options: Any) -> Any:
        if left:
            left.pop()()
        return then(*args, **options)

    return call


def test_while_it_is_written(drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(root / "x", b"data")
    real = FileDrainer._count
    monkeypatch.setattr(FileDrainer, "_count", once(lambda: os.rename(root / "x", root / "y"), real))
    assert not drainer.tick()
    settle(drainer)
    assert found(root) == {"y": b"data"}


def test_just_before_the_file_takes_its_name(drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(root / "x", b"data")
    monkeypatch.setattr(disk, "rename", once(lambda: os.rename(root / "x", root / "y"), disk.rename))
    settle(drainer)
    assert found(root) == {"y": b"data"}


def test_a_kill_between_two_names_in_memory_loses_nothing(
    drainer: FileDrainer, store: FilesDir, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root / "x", b"data")
    os.rename(root / "x", root / "y")

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(store.kept), "remove", fail)
        drainer.tick()
    assert len(store.kept.files()) == 2
    old = next(file for file in store.kept.files() if file.read_receipt().target == str(root / "x"))
    assert store.kept.recycle(old, store.path / "slot") is None, "its bytes have another name by now"
    settle(drainer)
    assert found(root) == {"y": b"data"} and len(store.kept.files()) == 1


def test_receipts_without_marks_are_read(tmp_path: Path) -> None:
    """As versions wrote them that followed no renames."""
    receipt = FileReceipt("/x/y", BYTES, 1, [checksum(b"x")], 1.0, placeholder=True, mark="ab")
    assert FileReceipt.decode(receipt.encode(), "here") == receipt
    fields = json.loads(receipt.encode())
    assert fields["placeholder"] is True, "which older agents look for"
    del fields["mark"], fields["digest"]
    older = FileReceipt.decode(seal(json.dumps(fields, separators=(",", ":")).encode()[1:]), "here")
    assert older.placeholder is True and older.mark == ""


def test_a_placeholder_without_a_mark_counts_as_it_did(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    for name, gone in (("x", False), ("y", True)):
        save(root / name, b"data")
        (file,) = store.kept.newest(stored=False)
        text = json.loads(file.receipt.read_bytes())
        del text["mark"], text["digest"]
        file.receipt.write_bytes(seal(json.dumps(text, separators=(",", ":")).encode()[1:]))
        (root / name).write_bytes(b"rekindle placeholder: the file is in the memory of node a, on its way here\n")
        if gone:
            (root / name).unlink()
        settle(drainer)
    assert found(root) == {"x": b"data"} and isinstance(file, KeptFile)


def test_a_directory_that_is_removed_while_its_file_is_written_says_nothing(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root / "x", b"data")
    monkeypatch.setattr(disk, "rename", once(lambda: shutil.rmtree(root), disk.rename))
    for _ in range(3):
        drainer.tick()
        drainer._failures.clear()  # instead of the pause until the next attempt
    assert found(root) == {"x": b"data"}


def test_a_directory_that_is_renamed_while_its_file_is_written(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root / "tmp" / "x", b"data")
    monkeypatch.setattr(disk, "rename", once(lambda: os.rename(root / "tmp", root / "final"), disk.rename))
    for _ in range(3):
        drainer.tick()
        drainer._failures.clear()
    assert found(root) == {"final/x": b"data"}


def test_between_two_looks_of_the_agent(drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its path when the agent looks where it is, and gone when it looks if it was removed."""
    save(root / "x", b"data")
    real = PathPlace.lacks
    monkeypatch.setattr(PathPlace, "lacks", once(lambda: os.rename(root / "x", root / "y"), real))
    settle(drainer)
    assert found(root) == {"y": b"data"}


def test_again_while_the_agent_looks_for_it(drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(root / "x", b"data")
    os.rename(root / "x", root / "y")
    real = renaming._holds
    monkeypatch.setattr(renaming, "_holds", once(lambda: os.rename(root / "y", root / "a"), real))
    settle(drainer)
    assert found(root) == {"a": b"data"}


def test_it_never_takes_a_name_that_nfs_gave(drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps what is replaced while it is open beside its path, until nobody has it open."""
    save(root / "x", b"data")
    monkeypatch.setattr(disk, "rename", once(lambda: os.rename(root / "x", root / ".nfs0001"), disk.rename))
    settle(drainer)
    (root / ".nfs0001").unlink()
    assert found(root) == {"x": b"data"}
    save(root / "y", b"data")
    os.rename(root / "y", root / ".nfs0002")  # as it is when the program removes it
    settle(drainer)
    assert found(root).keys() == {"x", ".nfs0002"} and (root / ".nfs0002").read_bytes() != b"data"


def test_into_another_directory_just_before_the_file_takes_its_name(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root / "tmp" / "a.pt", b"data")
    (root / "final").mkdir()
    shutil.copytree(root / "tmp", root / "copy")  # which stays a copy of the placeholder
    moves = once(lambda: os.rename(root / "tmp" / "a.pt", root / "final" / "a.pt"), disk.rename)
    monkeypatch.setattr(disk, "rename", moves)
    settle(drainer)
    assert found(root).keys() == {"final/a.pt", "copy/a.pt"} and (root / "final" / "a.pt").read_bytes() == b"data"


@pytest.mark.parametrize("act", ["flush", "load"])
def test_it_is_found_while_the_agent_lets_it_belong_at_its_new_name(
    act: str, drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listed under its old name, and read when it has its new one."""
    save(root / "x", b"data")
    os.rename(root / "x", root / "y")
    real = KeptFile.read_receipt
    monkeypatch.setattr(KeptFile, "read_receipt", once(drainer.tick, real))
    if act == "load":
        assert rekindle.load(root / "y") == b"data"
    else:
        with pytest.raises(rekindle.NotDurableError, match="not on storage after"):
            rekindle.flush(root / "y", timeout=0)
    assert (root / "y").read_bytes() != b"data"


def test_storage_that_does_not_show_what_is_at_a_path_is_asked_again_by_flush(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root / "latest", b"old")
    settle(drainer)
    save(root / "tmp", b"new")
    os.rename(root / "tmp", root / "latest")

    def fail(_: PathPlace) -> None:
        raise TimeoutError("storage hangs")

    with monkeypatch.context() as patch, pytest.raises(rekindle.NotDurableError, match="not on storage after"):
        patch.setattr(PathPlace, "standing", fail)
        rekindle.flush(root / "latest", timeout=0.1)
    settle(drainer)
    rekindle.flush(root / "latest", timeout=0)
    assert found(root) == {"latest": b"new"}


@pytest.mark.parametrize("renamed", [True, False])
@pytest.mark.parametrize("how", ["placeholder", "memory", "storage", "error"])
def test_a_slow_answer_of_storage_during_a_save_loses_no_older_file(
    renamed: bool, how: str, drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root / "x", b"older")
    if renamed:
        os.rename(root / "x", root / "y")

    def fail(*_: object, **__: object) -> None:
        raise TimeoutError("storage hangs")

    pool = clients.the_client()._pool
    with monkeypatch.context() as patch:
        patch.setattr(PathPlace, "standing", fail)
        if how in ("storage", "error"):
            patch.setattr(pool, "_limit", 1)
        if how == "error":
            patch.setattr(FileSettings, "raises_when_full", lambda *_: True)
            with pytest.raises(rekindle.MemoryStoreError):
                rekindle.save(b"newer", root / "x")
        else:
            where = rekindle.save(b"newer", root / "x", placeholder=how == "placeholder")
            assert where == ("storage" if how == "storage" else "memory")
    names = {"y": b"older"} if renamed else {}
    names |= {} if how == "error" else {"x": b"newer"}
    names = names or {"x": b"older"}
    for name, data in names.items():
        assert rekindle.load(root / name, raw=True) == data
    settle(drainer)
    assert found(root) == names
    for name, data in names.items():
        assert rekindle.load(root / name, raw=True) == data


def test_the_search_in_memory_reads_a_receipt_once(
    drainer: FileDrainer, store: FilesDir, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on under the lock of memory, for each of as many files as storage lacks."""
    for number in range(20):
        save(root / f"{number}", b"data")
    read: list[KeptFile] = []
    real = KeptFile.read_receipt

    def count(file: KeptFile) -> FileReceipt:
        read.append(file)
        return real(file)

    with monkeypatch.context() as patch:
        patch.setattr(KeptFile, "read_receipt", count)
        for _ in range(3):
            assert store.kept.marked("0" * 16) is None
        assert len(read) == 20
    (last,) = [file for file in store.kept.files() if file.number == 20]
    store.kept.remove(last)
    (root / "19").unlink()
    save(root / "19", b"other")
    (again,) = [file for file in store.kept.files() if file.number == 20]
    assert again == last, "whose number comes again"
    assert store.kept.marked(again.read_receipt().mark) == again


def test_a_later_save_without_a_placeholder_of_its_own_counts_on_the_one_that_stands(
    drainer: FileDrainer, root: Path
) -> None:
    """It is at the path, as far as the program can see, and goes where it is renamed to, or with it."""
    save(root / "x", b"older")
    rekindle.save(b"newer", root / "x")
    os.rename(root / "x", root / "y")
    assert rekindle.load(root / "y") == b"newer"
    settle(drainer)
    assert found(root) == {"y": b"newer"}
    save(root / "z", b"older")
    rekindle.save(b"newer", root / "z")
    os.unlink(root / "z")
    settle(drainer)
    assert found(root) == {"y": b"newer"}


def test_one_that_is_renamed_to_a_path_is_newer_than_what_was_saved_there_before(
    drainer: FileDrainer, root: Path
) -> None:
    save(root / "tmp", b"newer")
    rekindle.save(b"older", root / "final")  # with a higher number
    os.rename(root / "tmp", root / "final")
    assert rekindle.load(root / "final") == b"newer"
    settle(drainer)
    assert found(root) == {"final": b"newer"}


def test_it_is_found_at_once_where_an_older_file_is_on_its_way(drainer: FileDrainer, root: Path) -> None:
    rekindle.save(b"older", root / "x")
    save(root / "tmp", b"newer")
    os.rename(root / "tmp", root / "x")
    assert rekindle.load(root / "x") == b"newer"


def test_it_comes_back_to_its_first_name_with_a_newer_file(drainer: FileDrainer, root: Path) -> None:
    save(root / "x", b"older")
    os.rename(root / "x", root / "y")
    save(root / "y", b"newer")
    os.rename(root / "y", root / "x")
    assert rekindle.load(root / "x") == b"newer"
    settle(drainer)
    assert found(root) == {"x": b"newer"}


@pytest.mark.parametrize("how", ["memory", "storage"])
def test_by_another_thread_while_its_path_is_saved_to(
    how: str, drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with torch.save: the rename takes what is at the path then, the newer file once it has begun to come there."""
    save(root / "x", b"older")
    monkeypatch.setattr(clients.the_client()._pool, "_limit", 1 if how == "storage" else None)
    owner, name = (PathPlace, "write_stream") if how == "storage" else (clients.Client, "keep")
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, once(lambda: os.rename(root / "x", root / "y"), real))
    assert rekindle.save(b"newer", root / "x") == how
    names = {"y": b"newer"} if how == "memory" else {"x": b"newer", "y": b"older"}
    for name, data in names.items():
        assert rekindle.load(root / name, raw=True) == data
    settle(drainer)
    assert found(root) == names


def test_a_link_that_is_put_in_its_place_stays(drainer: FileDrainer, root: Path) -> None:
    save(root / "x", b"data")
    os.rename(root / "x", root / "y")
    os.symlink("y", root / "x")
    settle(drainer)
    assert os.readlink(root / "x") == "y" and (root / "y").read_bytes() == b"data"


@pytest.mark.parametrize("act", ["rename", "unlink"])
def test_it_is_not_found_by_its_old_name(act: str, drainer: FileDrainer, root: Path) -> None:
    save(root / "x", b"data")
    if act == "rename":
        os.rename(root / "x", root / "y")
    else:
        os.unlink(root / "x")
    with pytest.raises(rekindle.NotFoundError):
        rekindle.load(root / "x")


def test_a_save_that_fails_takes_no_others_placeholder_away(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root / "tmp", b"data")

    def fail(*_: object, **__: object) -> None:
        os.rename(root / "tmp", root / "x")
        raise rekindle.MemoryStoreError("memory is full")

    monkeypatch.setattr(FileSettings, "raises_when_full", lambda *_: True)
    with monkeypatch.context() as patch, pytest.raises(rekindle.MemoryStoreError):
        patch.setattr(clients.Client, "save", fail)
        save(root / "x", b"other")
    settle(drainer)
    assert found(root) == {"x": b"data"}


@pytest.mark.parametrize("where", ["far", "nowhere"])
def test_one_that_goes_too_far_is_told_of(
    where: str, drainer: FileDrainer, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(root / "x", b"data")
    if where == "far":
        (root / "a").mkdir()
        os.rename(root / "x", root / "a" / "y")
    else:
        os.unlink(root / "x")
    caplog.set_level("INFO", "rekindle.agent")
    settle(drainer)
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if f"{root / 'x'}: " in line and "gives" in line]) == 1, lines
