"""Files that go to storage after others, in place of others, or not yet."""

from __future__ import annotations

from pathlib import Path

import pytest

import rekindle
from rekindle.agent.file_drain import FileDrainer
from rekindle.files.contents import of_bytes
from rekindle.files.saving import save_target
from rekindle.format.file_receipt import BYTES, FileReceipt, Terms
from rekindle.format.receipt import checksum
from rekindle.memory.files_dir import FilesDir
from rekindle.storage.path_place import PathPlace


def save(path: Path, terms: Terms, data: bytes = b"data") -> None:
    save_target(str(path), of_bytes(data), terms=terms)


def test_a_file_waits_for_those_that_come_before(drainer: FileDrainer, root: Path) -> None:
    save(root / "last", Terms(after=[str(root / "a"), str(root / "b")]))
    rekindle.save(b"a", root / "a")
    drainer.tick()
    assert (root / "a").exists() and not (root / "last").exists()
    drainer.tick()
    assert "waits for" in drainer.progress.failed[str(root / "last")] and str(root / "b") in (
        drainer.progress.error or ""
    )
    (root / "b").write_bytes(b"of another node")
    drainer._failures.clear()
    drainer.tick()
    assert (root / "last").read_bytes() == b"data"


def test_the_newest_of_a_file_that_comes_before_counts(drainer: FileDrainer, root: Path) -> None:
    rekindle.save(b"a1", root / "a")
    drainer.tick()
    rekindle.save(b"a2", root / "a")
    save(root / "last", Terms(after=[str(root / "a")]))
    drainer._failures.clear()
    while drainer.tick():
        pass
    assert (root / "a").read_bytes() == b"a2" and (root / "last").exists()


def test_a_file_removes_another_before_it_comes(drainer: FileDrainer, root: Path) -> None:
    root.mkdir()
    (root / "mark").touch()
    save(root / "x", Terms(removes="mark"))
    drainer.tick()
    assert (root / "x").exists() and not (root / "mark").exists()


def test_a_placeholder_of_another_node_is_not_the_file_that_comes_before(drainer: FileDrainer, root: Path) -> None:
    assert PathPlace(root / "x", "another").put_placeholder("on its way")
    save(root / "mark", Terms([str(root / "x")]))
    assert not drainer.tick() and not (root / "mark").exists()
    (root / "x").write_bytes(b"data")
    drainer._failures.clear()
    assert drainer.tick() and (root / "mark").exists()


def test_a_held_file_stays_until_it_is_let_go(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    save(root / "x", Terms(held=True))
    save(store.path / "inside", Terms(held=True))
    assert not drainer.tick() and drainer.pending() is None and not root.exists()
    rekindle.flush(timeout=0)
    with pytest.raises(rekindle.NotDurableError, match="held in memory"):
        rekindle.flush(root / "x", timeout=0)
    assert rekindle.load(root / "x") == b"data"
    assert {found.path: found.state for found in rekindle.files.status()}[str(root / "x")] == "memory"
    store.let_go()
    assert drainer.tick() and (root / "x").read_bytes() == b"data"
    assert not (store.path / "inside").exists() and rekindle.load(store.path / "inside") == b"data"


def test_a_held_file_is_not_evicted(drainer: FileDrainer, root: Path) -> None:
    save(root / "x", Terms(held=True), bytes(1 << 20))
    rekindle.files.configure(limit="1.5MiB")
    assert rekindle.save(bytes(1 << 20), root / "y") == "storage"
    assert rekindle.load(root / "x") == bytes(1 << 20)


def test_a_save_takes_the_place_of_a_held_file(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    save(root / "x", Terms(held=True))
    rekindle.save(b"newer", root / "x")
    assert store.kept.held() == [] and drainer.tick() and (root / "x").read_bytes() == b"newer"
    assert [path.suffix for path in store.kept_path.iterdir() if path.suffix == ".held"] == []


def test_files_are_given_up(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    rekindle.save(b"x", root / "x")
    rekindle.save(b"y1", root / "y")
    files = store.kept.files()
    rekindle.save(b"y2", root / "y")
    store.give_up(files)
    assert [file.read_receipt().target for file in store.kept.files()] == [str(root / "y")]
    assert rekindle.load(root / "y") == b"y2", "it was saved since"


@pytest.mark.parametrize(
    "fields", [{"removes": "../x"}, {"removes": ".."}, {"removes": 1}, {"held": 1}, {"after": "x"}, {"after": [1]}]
)
def test_terms_that_nobody_wrote_are_refused(fields: dict[str, object]) -> None:
    class Forged(Terms):
        def encode(self) -> dict[str, object]:
            return fields

    sound = FileReceipt("/x/y", BYTES, 1, [checksum(b"x")], 1.0, None, Terms(["/x/z"], "mark", True))
    assert FileReceipt.decode(sound.encode(), "here") == sound
    forged = FileReceipt("/x/y", BYTES, 1, [checksum(b"x")], 1.0, None, Forged())
    with pytest.raises(rekindle.FormatError, match="here"):
        FileReceipt.decode(forged.encode(), "here")
