"""The checkpoint engine on one rank, called as DeepSpeed calls it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rekindle
from rekindle.errors import CorruptError
from rekindle.integrations.deepspeed import RekindleCheckpointEngine
from rekindle.integrations.deepspeed.latest import LatestKeeper
from rekindle.integrations.deepspeed.notes import look, note_path
from rekindle.memory.files_dir import FilesDir
from rekindle.memory.kept import key_of
from rekindle.session.group import SingleProcess
from tests.faults.harness import wait_for
from tests.files.conftest import store  # noqa: F401  fixture


@dataclass
class Info:
    """DeepSpeed's CheckpointCommitInfo."""

    tag: str
    save_dir: str
    save_latest: bool


class Before:
    """The engine that was there before."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def is_data_parallel_writer(self, rank: int) -> bool:
        return rank == 0

    def create(self, info: Any) -> None:
        self.calls.append(("create", info.tag))

    def save(self, state: Any, path: str) -> None:
        self.calls.append(("save", Path(path).name))

    def commit(self, info: Any) -> bool:
        self.calls.append(("commit", info.tag))
        return True


@pytest.fixture
def before() -> Iterator[Before]:
    yield Before()
    while _made:  # nothing to wait for at the end of this process
        _made.pop().give_up()


_made: list[LatestKeeper] = []


def engine_of(root: Path, before: Before, start: str = "start") -> RekindleCheckpointEngine:
    root.mkdir(exist_ok=True)
    engine = RekindleCheckpointEngine(SimpleNamespace(checkpoint_engine=before), root, SingleProcess(), start, 0)
    assert engine._latest is not None
    _made.append(engine._latest)
    return engine


def save(engine: RekindleCheckpointEngine, root: Path, tag: str, value: int) -> None:
    engine.create(Info(tag, str(root), True))
    engine.save({"x": torch.full((8,), value)}, str(root / tag / "model.pt"))
    engine.end()
    assert not engine.get_commit_info().save_latest  # DeepSpeed would write it too early
    assert engine.commit(engine.get_commit_info())
    assert engine.get_commit_info() is None


def test_a_checkpoint_is_in_memory_before_it_is_on_storage_and_latest_comes_last(
    store: FilesDir,  # noqa: F811
    root: Path,
    before: Before,
) -> None:
    engine = engine_of(root, before)
    store.create()
    turn = store.writing(key_of(str(root / "a" / "model.pt")))
    assert turn.acquire()  # the agent waits for it before it carries the file
    save(engine, root, "a", 1)
    assert not (root / "latest").exists()
    assert engine.find(None) == "a"
    assert torch.equal(engine.load(str(root / "a" / "model.pt"), "cpu")["x"], torch.full((8,), 1))
    turn.release()
    rekindle.flush(timeout=60)
    engine.cleanup()
    assert (root / "latest").read_text() == "a" and before.calls == []


def test_a_start_names_what_the_one_before_had_no_time_for(
    store: FilesDir,  # noqa: F811
    root: Path,
    before: Before,
) -> None:
    first = engine_of(root, before)
    first._latest = None  # as if killed
    save(first, root, "a", 1)
    rekindle.flush(timeout=60)
    assert not (root / "latest").exists()
    engine_of(root, before, "second").name_newest([look(root)])
    wait_for((root / "latest").exists)
    assert (root / "latest").read_text() == "a"


def test_another_directory_and_other_files_are_left_to_the_engine_before(
    store: FilesDir,  # noqa: F811
    root: Path,
    before: Before,
    tmp_path: Path,
) -> None:
    engine = engine_of(root, before)
    info = Info("a", str(tmp_path / "other"), True)
    engine.create(info)
    engine.save({}, str(tmp_path / "other" / "a" / "model.pt"))
    engine.end()
    assert not engine.is_decoupled() and engine.commit(info)
    assert before.calls == [("create", "a"), ("save", "model.pt"), ("commit", "a")]
    assert engine.is_data_parallel_writer(0)


def test_weights_saved_by_themselves_leave_the_checkpoint_of_their_step_alone(
    store: FilesDir,  # noqa: F811
    root: Path,
    before: Before,
) -> None:
    """``save_16bit_model`` names the step's tag, and writes no file of it."""
    engine = engine_of(root, before)
    save(engine, root, "a", 1)
    info = Info("a", str(root), False)
    engine.create(info)
    engine.save({}, str(root / "pytorch_model.bin"))
    engine.commit(info)
    assert before.calls == [("save", "pytorch_model.bin")]
    assert engine.find(None) == "a"


def test_a_save_that_fails_is_a_warning_and_the_checkpoint_before_counts(
    store: FilesDir,  # noqa: F811
    root: Path,
    before: Before,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = engine_of(root, before)
    save(engine, root, "a", 1)
    (root / "b" / "model.pt").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "rekindle"):
        save(engine, root, "b", 2)
    assert "could not be saved" in caplog.text and "is a directory" in caplog.text
    assert engine.find(None) == "a"


def test_a_tag_that_is_saved_anew_and_not_to_its_end_is_refused_by_name(
    store: FilesDir,  # noqa: F811
    root: Path,
    before: Before,
) -> None:
    """Its files are those of two saves. ``latest`` may still name it."""
    engine = engine_of(root, before)
    save(engine, root, "a", 1)
    engine.cleanup()
    again = engine_of(root, before, "again")
    again.create(Info("a", str(root), True))
    again.save({"x": torch.zeros(8)}, str(root / "a" / "model.pt"))
    assert look(root).latest == "a" and note_path(root, "a", 0).exists()
    with pytest.raises(CorruptError, match="not saved to its end"):
        engine_of(root, before, "third").find(None)
