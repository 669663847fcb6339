"""Of several saves to one path the newest wins: of threads, processes, and beside an upload."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import rekindle
from rekindle.agent.file_drain import FileDrainer
from rekindle.files import client as clients
from rekindle.memory import kept
from rekindle.memory.files_dir import FilesDir
from rekindle.memory.kept import key_of
from rekindle.storage.path_place import PathPlace
from tests.files.programs import arrives, run


def test_the_old_file_stays_until_the_newest_takes_its_place(drainer: FileDrainer, root: Path) -> None:
    path = root / "x"
    rekindle.save(b"old", path)
    assert drainer.tick()
    for number in range(5):
        rekindle.save(b"%d" % number, path)
    assert path.read_bytes() == b"old" and rekindle.load(path) == b"4"
    assert drainer.tick() and path.read_bytes() == b"4"
    assert not drainer.tick()
    assert os.listdir(root) == ["x"]


def test_one_that_is_saved_during_an_upload_follows_it(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that is saved faster than storage takes it must still get there."""
    path, real, seen = root / "x", PathPlace._replace, []

    def slow(self: PathPlace, fill: object) -> object:
        if not seen:
            rekindle.save(b"newer", path)
        found = real(self, fill)  # type: ignore[arg-type]
        seen.append(path.read_bytes())
        return found

    monkeypatch.setattr(PathPlace, "_replace", slow)
    rekindle.save(b"first", path)
    assert drainer.tick() and drainer.tick() and not drainer.tick()
    assert seen == [b"first", b"newer"] and rekindle.load(path) == b"newer"


def test_a_preload_never_takes_the_place_of_a_save(
    drainer: FileDrainer, store: FilesDir, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = root / "x", PathPlace.read
    root.mkdir()
    path.write_bytes(b"stored")

    def meanwhile(self: PathPlace, start: int, stop: int) -> Iterator[memoryview]:
        rekindle.save(b"newer", path)
        return real(self, start, stop)

    monkeypatch.setattr(PathPlace, "read", meanwhile)
    rekindle.files.preload(path)
    assert rekindle.load(path) == b"newer" and list(store.paths.slots.iterdir()) == []
    assert drainer.tick() and path.read_bytes() == b"newer"


def test_a_file_can_be_read_as_soon_as_it_is_seen(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a load would take the older file at the path for the newest."""
    real, seen = kept.write_atomic, []

    def look(path: Path, data: bytes) -> None:
        real(path, data)
        seen.append(rekindle.load(root / "x"))

    monkeypatch.setattr(kept, "write_atomic", look)
    rekindle.save(b"data", root / "x")
    assert seen == [b"data"]


def test_a_reader_keeps_what_it_has_opened(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    old = bytes(range(256)) * 100_000  # large enough for its memory to be used again
    rekindle.save(old, root / "x")
    with store.kept.pin(store.kept.files()[0]) as opened:
        for _ in range(3):
            rekindle.save(bytes(len(old)), root / "x")
        assert bytes(opened.map()) == old


def test_threads_that_save_to_one_path_and_to_many(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    def work(number: int) -> None:
        for turn in range(8):
            rekindle.save(b"%d %d" % (number, turn), root / f"own-{number}")
            rekindle.save(b"%d" % number * 300_000, root / "shared")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = rekindle.load(root / "shared")
    while drainer.tick():
        pass
    assert (root / "shared").read_bytes() == last and len(last) == 300_000 and len(set(last)) == 1
    assert [(root / f"own-{n}").read_bytes() for n in range(6)] == [b"%d 7" % n for n in range(6)]
    assert sum(1 for _ in store.kept_path.glob("*.*")) == 3 * 7


def test_processes_that_save_to_one_path(store: FilesDir, root: Path) -> None:
    code = "for n in range(30): rekindle.save(sys.argv[1].encode() * 5000, sys.argv[2])"
    threads = [threading.Thread(target=run, args=(code, name, root / "x")) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = rekindle.load(root / "x")
    arrives(store)
    assert (root / "x").read_bytes() == last and len(set(last)) == 1 and len(last) == 5000


def _save(path: Path, answers: multiprocessing.SimpleQueue[str]) -> None:
    try:
        rekindle.save(b"child", path)
        answers.put("saved")
    except rekindle.UsageError as error:
        answers.put(str(error))


@pytest.fixture
def forked(root: Path) -> Iterator[str]:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=_save, args=(root / "x", answers))
    process.start()
    process.join(60)
    yield answers.get()


@pytest.fixture
def parent(drainer: FileDrainer, root: Path) -> None:
    rekindle.save(b"parent", root / "x")


def test_a_forked_child_is_refused_by_name(parent: None, forked: str, store: FilesDir, root: Path) -> None:
    assert f"was forked from process {os.getpid()}" in forked and "spawn" in forked
    assert rekindle.load(root / "x") == b"parent"
    assert store.trainers() == {os.getpid(): os.getpid()}


def test_a_child_that_is_forked_while_its_parent_joins_waits_for_nobody(
    drainer: FileDrainer, store: FilesDir, root: Path
) -> None:
    joining, forked = threading.Event(), threading.Event()

    def join() -> None:
        with clients._making.entered():
            joining.set()
            forked.wait(60)

    thread = threading.Thread(target=join)
    thread.start()
    assert joining.wait(60)
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        os._exit(rekindle.save(b"child", root / "x") != "memory")
    forked.set()
    thread.join()
    assert os.waitpid(pid, 0)[1] == 0
    assert rekindle.load(root / "x") == b"child"


def test_an_older_one_in_memory_never_follows_one_that_was_written_straight_to_storage(
    drainer: FileDrainer, store: FilesDir, root: Path
) -> None:
    path = root / "x"
    rekindle.save(b"older", path)
    rekindle.files.configure(limit=10)
    assert rekindle.save(bytes(1000), path) == "storage"
    assert path.read_bytes() == bytes(1000) == rekindle.load(path, raw=True)
    assert not drainer.tick() and path.read_bytes() == bytes(1000)


def test_a_write_to_storage_waits_for_its_turn(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    """An agent that is just writing an older one there would rename it over the newer."""
    path = root / "x"
    rekindle.save(b"older", path)
    turn = store.writing(key_of(str(path)))
    assert turn.acquire()
    rekindle.files.configure(limit=10)
    saving = threading.Thread(target=rekindle.save, args=(bytes(1000), path))
    saving.start()
    saving.join(0.3)
    assert saving.is_alive() and not path.exists()
    turn.release()
    saving.join(60)
    assert path.read_bytes() == bytes(1000) and store.kept.files() == []
