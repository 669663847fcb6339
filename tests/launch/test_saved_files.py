"""What the launcher learns and says of files that were saved by their paths."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

import rekindle
from rekindle.agent.file_drain import FileDrainer
from rekindle.common.environ import LAUNCH
from rekindle.files import telling
from rekindle.launch.saved_files import describe_saved_files, files_saved_since
from rekindle.launch.torchrun import _say_what_is_saved
from rekindle.memory.files_dir import FilesDir
from rekindle.storage.path_place import PLACEHOLDER
from tests.files.conftest import drainer, store  # noqa: F401  fixtures


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The launcher's directory."""
    place = tmp_path / "launch"
    place.mkdir()
    monkeypatch.setenv(LAUNCH, str(place))
    monkeypatch.setattr(telling, "_told", {})
    return place


def said(place: Path) -> list[str]:
    lines: list[str] = []
    _say_what_is_saved(place, lines.append)
    return lines


def test_the_files_of_a_start(drainer: FileDrainer, place: Path, root: Path) -> None:  # noqa: F811
    begun = time.time()
    rekindle.save(b"1", root / "a")
    rekindle.save(b"2", root / "b")
    found = files_saved_since(place, begun)
    assert list(found) == [str(root / "a"), str(root / "b")] and 0 <= found[str(root / "a")] < 100
    assert files_saved_since(place, time.time()) == {}, "they are of an earlier start"


def test_a_path_that_is_saved_all_the_time_is_told_of_once_a_minute(
    drainer: FileDrainer,  # noqa: F811
    place: Path,
    root: Path,
) -> None:
    for _ in range(5):
        rekindle.save(b"1", root / "a")
    (told,) = place.iterdir()
    assert len(told.read_text().splitlines()) == 1
    telling._told[str(root / "a")] -= 60
    rekindle.save(b"1", root / "a")
    assert len(told.read_text().splitlines()) == 2
    assert len(files_saved_since(place, 0)) == 1


def test_files_that_were_written_straight_to_storage_are_told_of(
    drainer: FileDrainer,  # noqa: F811
    place: Path,
    root: Path,
) -> None:
    rekindle.files.configure(limit=10)
    assert rekindle.save(bytes(100), root / "a") == "storage"
    assert list(files_saved_since(place, 0)) == [str(root / "a")]
    assert said(place) == [f"{root / 'a'}: the only file saved, on storage"]


def test_nothing_is_told_without_a_launcher(
    drainer: FileDrainer,  # noqa: F811
    place: Path,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(LAUNCH)
    rekindle.save(b"1", root / "a")
    assert list(place.iterdir()) == [] and describe_saved_files(place) is None


def test_a_save_goes_on_where_the_launcher_can_not_be_told(drainer: FileDrainer, place: Path, root: Path) -> None:  # noqa: F811
    place.rmdir()
    assert rekindle.save(b"1", root / "a") == "memory"


def test_the_newest_file_is_named_with_its_state(
    drainer: FileDrainer,  # noqa: F811
    store: FilesDir,  # noqa: F811
    place: Path,
    root: Path,
) -> None:
    a, b = root / "a", root / "b"
    rekindle.save(b"1", a)
    waits = "in this node's memory, and not on storage yet"
    hint = "'rekindle flush' waits for it"
    assert said(place) == [f"{a}: the only file saved, {waits}: {hint}"]
    rekindle.save(b"2", b)
    more = "; of the others 1 are not on storage yet"
    assert said(place) == [f"{b}: the newest of 2 files saved, {waits}: {hint}{more}"]
    assert drainer.tick()
    assert said(place) == [f"{b}: the newest of 2 files saved, on storage"]
    rekindle.save(b"3", a)  # within the minute in which it isn't told of again
    assert said(place) == [f"{a}: the newest of 2 files saved, {waits}: {hint}"]


def test_the_newest_file_is_looked_for_where_memory_has_given_it_up(
    drainer: FileDrainer,  # noqa: F811
    store: FilesDir,  # noqa: F811
    place: Path,
    root: Path,
) -> None:
    path = root / "a"
    rekindle.save(b"1", path)
    assert drainer.tick()
    store.give_up(store.kept.files())
    assert said(place) == [f"{path}: the only file saved, on storage"]
    for text in (PLACEHOLDER, None):
        path.unlink()
        if text is not None:
            path.write_bytes(text)
        assert said(place) == [f"{path}: the only file saved, and no longer there: somebody has removed it"]


def test_a_failed_upload_is_told_of(drainer: FileDrainer, store: FilesDir, place: Path, tmp_path: Path) -> None:  # noqa: F811
    rekindle.save(b"1", tmp_path / "dir" / "a")
    (tmp_path / "dir").write_bytes(b"in the way")
    assert not drainer.tick()
    store.notes.write_agent_status({"error": None, "failed": drainer.progress.failed})
    (line,) = said(place)
    assert "in this node's memory, and not on storage yet, as " in line, line


def test_files_of_another_run_are_not_counted(drainer: FileDrainer, place: Path, root: Path) -> None:  # noqa: F811
    rekindle.save(b"1", root / "a")
    os.environ.pop(LAUNCH)  # the fixture sets it back
    rekindle.save(b"2", root / "b")
    assert said(place)[0].startswith(f"{root / 'a'}: the only file saved, ")


@pytest.mark.parametrize("rest", ["", "[", "[1, 2]\n", "null\n", '["x", "y", "z"]\n', "\udcff\n"])
def test_a_line_that_is_not_whole_is_passed_over(rest: str, place: Path) -> None:
    line = json.dumps([time.time(), "/x/a", "/nosuch"])
    (place / "7.saved").write_bytes(f"{line}\n{rest}".encode(errors="surrogateescape"))
    assert list(files_saved_since(place, 0)) == ["/x/a"]


def test_a_memory_store_that_can_not_be_read(drainer: FileDrainer, store: FilesDir, place: Path, root: Path) -> None:  # noqa: F811
    rekindle.save(b"1", root / "a")
    store.path.parent.chmod(0o755)
    (line,) = said(place)
    store.path.parent.chmod(0o700)
    assert line.startswith(f"{root / 'a'}: was saved; can't tell if it is on storage: ") and "open to others" in line
