"""The choice of a checkpoint of DeepSpeed, and the file ``latest``, without DeepSpeed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rekindle
from rekindle.errors import UsageError
from rekindle.integrations.deepspeed import attach, latest
from rekindle.integrations.deepspeed.latest import LatestKeeper
from rekindle.integrations.deepspeed.notes import Entry, Note, Sight, choose, is_durable, look, note_path, whole
from rekindle.memory.files_dir import FilesDir
from tests.faults.harness import wait_for
from tests.files.conftest import store  # noqa: F401  fixture


def note(tag: str, number: int, rank: int = 0, **changes: Any) -> Note:
    files = {f"{rank}.pt": Entry(4)}
    return replace(Note(tag, number, "start", rank, 2, True, "", files), **changes)


def both(tag: str, number: int, **changes: Any) -> list[Note]:
    return [note(tag, number, rank, **changes) for rank in range(2)]


def seen(notes: list[Note], latest: str = "", missing: tuple[str, ...] = ()) -> list[Sight]:
    there = {(one.tag, one.rank, name) for one in notes for name in one.files if name not in missing}
    return [Sight(latest, notes, there)]


def test_the_newest_whole_one_is_chosen() -> None:
    assert choose(seen(both("a", 1) + both("b", 2), latest="a")) == "b"


@pytest.mark.parametrize(
    "newer",
    [
        [note("b", 2)],
        [note("b", 2), note("b", 2, 1, start="another")],
        [note("b", 2), note("b", 3, 1)],
        [note("b", 2), note("b", 2, 1, done=False)],
        both("b", 2, named=False),
    ],
    ids=["a rank missing", "two starts", "two saves", "not saved to its end", "without latest"],
)
def test_what_is_not_whole_or_not_to_be_named_is_passed_over(newer: list[Note]) -> None:
    assert choose(seen(both("a", 1) + newer)) == "a"


def test_one_whose_file_was_lost_is_passed_over() -> None:
    notes = both("a", 1) + both("b", 2, files={"lost.pt": Entry(4)})
    assert choose(seen(notes, missing=("lost.pt",))) == "a"


def test_a_tag_that_is_saved_anew_hides_the_older_one_from_the_first_note_on() -> None:
    """The file of rank 0 may be the newer one already, though all older notes are still seen somewhere."""
    anew = note("a", 2, start="another", done=False)
    assert whole([*seen(both("a", 1)), *seen([anew])]) == {}


def test_ranks_see_together_what_none_sees_alone() -> None:
    first, second = both("a", 1)
    assert choose(seen([first])) is None
    assert choose([*seen([first]), *seen([second])]) == "a"


def test_a_checkpoint_saved_without_rekindle_since_counts() -> None:
    assert choose(seen(both("a", 1), latest="foreign")) is None
    assert choose(seen(both("a", 1, before="foreign"), latest="foreign")) == "a"


def test_what_is_no_note_is_none() -> None:
    whole_note = note("a", 1)
    assert Note.decode(whole_note.encode(), "a") == whole_note
    for bad in (b"", b"[]", b"{}", b"\xff", whole_note.encode()[:-9], whole_note.encode().replace(b": 4", b": -4")):
        assert Note.decode(bad, "a") is None


def put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def test_durable_is_only_what_has_all_files_at_their_paths(root: Path) -> None:
    notes = both("a", 1)
    for one in notes:
        put(note_path(root, "a", one.rank), one.encode())
    put(root / "a" / "0.pt", b"four")
    assert not is_durable(root, "a", 1, "start")
    put(root / "a" / "1.pt", b"rekindle placeholder: on its way")
    assert not is_durable(root, "a", 1, "start")
    put(root / "a" / "1.pt", b"four")
    assert is_durable(root, "a", 1, "start")
    assert not is_durable(root, "a", 2, "start") and not is_durable(root, "a", 1, "another")
    info = (root / "a" / "1.pt").stat()
    old = replace(notes[1], files={"1.pt": Entry(4, (info.st_ino, info.st_mtime_ns))})
    put(note_path(root, "a", 1), old.encode())  # the file there is the one that is to be replaced
    assert not is_durable(root, "a", 1, "start")


def test_latest_waits_for_the_files_of_all_ranks(root: Path) -> None:
    keeper = LatestKeeper(root, "start")
    for tag, number in (("a", 1), ("b", 2)):
        for one in both(tag, number):
            put(note_path(root, tag, one.rank), one.encode())
        put(root / tag / "0.pt", b"four")
        keeper.add(note(tag, number))
    assert not keeper.wait(1.2) and not (root / "latest").exists()
    put(root / "b" / "1.pt", b"four")
    wait_for((root / "latest").exists)
    assert (root / "latest").read_text() == "b"
    assert keeper.wait(60)
    put(root / "a" / "1.pt", b"four")  # the older one comes last, and is not named
    assert (root / "latest").read_text() == "b"


def test_memory_and_storage_are_looked_at(store: FilesDir, root: Path) -> None:  # noqa: F811
    for one in both("a", 1):
        rekindle.save(b"four", root / "a" / f"{one.rank}.pt", placeholder=True)
        rekindle.save(one.encode(), note_path(root, "a", one.rank))
    assert whole([look(root)]) == {"a": both("a", 1)}
    rekindle.flush(timeout=60)
    assert whole([look(root)]) == {"a": both("a", 1)} and is_durable(root, "a", 1, "start")


def test_of_checkpoints_older_than_latest_only_one_note_is_read(store: FilesDir, root: Path) -> None:  # noqa: F811
    for tag, number in (("a", 1), ("b", 2), ("c", 3)):
        for one in both(tag, number):
            put(note_path(root, tag, one.rank), one.encode())
    put(root / "latest", b"b")
    assert {one.tag for one in look(root).notes} == {"b", "c"}
    assert {one.tag for one in look(root, "a").notes} == {"a", "b", "c"}
    assert look(root, storage=False).notes == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_decoupled": lambda: True}, "asynchronous"),
        ({"nvme": True}, "NVMe"),
    ],
)
def test_what_cannot_go_through_memory_is_refused(changes: dict[str, Any], message: str, root: Path) -> None:
    before = SimpleNamespace(is_decoupled=changes.get("is_decoupled", lambda: False))
    nvme = changes.get("nvme", False)
    engine = SimpleNamespace(checkpoint_engine=before, zero_nvme_offload_optimizer=lambda: nvme)
    with pytest.raises(UsageError, match=message):
        attach(engine, root)
    with pytest.raises(UsageError, match="directories"):
        attach(engine, "s3://bucket/run")


def test_the_end_waits_once_for_what_does_not_come(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(latest, "_ARRIVES", 0.1)
    keeper = LatestKeeper(root, "start")
    keeper.add(note("a", 1))
    keeper.finish()
    assert "storage lacks files of a" in caplog.text
    monkeypatch.setattr(latest, "_ARRIVES", 1000.0)
    keeper.finish()
    assert not (root / "latest").exists()
