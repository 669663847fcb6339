"""Saves that something comes between: a signal handler, an interrupt, the end of the process, a lack of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rekindle
from rekindle.agent.file_drain import FileDrainer
from rekindle.common.timeouts import in_background
from rekindle.files import pool
from rekindle.files.quota import Quota
from rekindle.memory import files_dir, job_dir
from rekindle.memory.files_dir import FilesDir
from rekindle.storage.path_place import PathPlace
from tests.faults.harness import wait_for
from tests.files.programs import run


def once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, work: Callable[[], object]) -> None:
    """Has ``work`` done before the next call of a method, as a signal handler would."""
    real = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(owner, name, real)
        work()
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, call)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("same", [True, False])
def test_a_signal_handler_saves_while_its_thread_is_saving(
    same: bool, drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for its own thread for ever. It writes to storage instead."""
    saved: list[str] = []
    rekindle.save(b"before", root / "before")
    other = root / ("x" if same else "y")
    once(monkeypatch, Quota, "make_room", lambda: saved.append(rekindle.save(b"from the handler", other)))
    answer = in_background(lambda: rekindle.save(b"data", root / "x"), "test-save")
    assert answer.result(60) == "memory" and saved == ["storage"]
    assert other.read_bytes() == b"from the handler"
    assert rekindle.save(b"after", root / "after") == "memory"
    assert drainer.tick() and (root / "x").read_bytes() == b"data"


def test_a_signal_handler_saves_when_its_thread_has_just_locked_memory(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shares the lock, whether or not its thread knows yet that it has it."""
    monkeypatch.setattr(job_dir, "_LOCK_SECONDS", 0.2)
    saved, real = [rekindle.save(b"older", root / "x")], job_dir.wait_for_lock

    def take(fd: int, path: Path) -> None:
        monkeypatch.setattr(files_dir, "wait_for_lock", real)
        real(fd, path)
        saved.append(rekindle.save(b"from the handler", root / "x"))

    monkeypatch.setattr(files_dir, "wait_for_lock", take)
    assert in_background(lambda: rekindle.save(b"data", root / "y"), "test-save").result(60) == "memory"
    assert saved == ["memory", "storage"] and (root / "x").read_bytes() == b"from the handler"


def test_a_signal_handler_does_not_wait_for_its_threads_write_to_the_same_path(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rekindle.files.configure(limit=1)

    def handle() -> None:
        with pytest.raises(rekindle.BusyError, match="signal handler"):
            rekindle.save(b"from the handler", root / "x")

    once(monkeypatch, PathPlace, "write_stream", handle)
    assert in_background(lambda: rekindle.save(b"data", root / "x"), "test-save").result(60) == "storage"
    assert (root / "x").read_bytes() == b"data" and rekindle.save(b"after", root / "x") == "storage"


def test_a_signal_handler_flushes_while_its_thread_is_saving(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rekindle.save(b"before", root / "before")

    def handle() -> None:
        with pytest.raises(rekindle.NotDurableError):
            rekindle.flush(timeout=0)

    once(monkeypatch, Quota, "make_room", handle)
    assert in_background(lambda: rekindle.save(b"data", root / "x"), "test-save").result(60) == "memory"


@pytest.mark.parametrize("call", ["_fit", "_give_up"])
def test_an_interrupt_leaves_nothing_behind_and_hinders_no_later_save(
    call: str, drainer: FileDrainer, store: FilesDir, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "AT_ONCE", 4096)
    data = bytes(100_000)
    for _ in range(2):
        rekindle.save(data, root / "x")
    once(monkeypatch, pool if call == "_fit" else pool.Pool, call, interrupt)
    with pytest.raises(KeyboardInterrupt):
        rekindle.save(data, root / "x")
    assert rekindle.load(root / "x") == data
    for _ in range(3):
        assert rekindle.save(b"1" + data, root / "x") == "memory"
    assert drainer.tick() and (root / "x").read_bytes() == b"1" + data
    held = [path.name for path in store.paths.slots.iterdir() if path.stat().st_size]
    assert len(held) <= pool._MOST_SPARES


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_save_at_the_end_of_the_process_arrives(when: str, store: FilesDir, root: Path) -> None:
    """Whether its function is called before that of Rekindle, or after it."""
    early = "rekindle.save(b'early', sys.argv[1] + '/early')\n"
    code = (
        "import atexit\n"
        "def end():\n"
        "    rekindle.save(b'late', sys.argv[1] + '/late')\n"
        "    assert rekindle.load(sys.argv[1] + '/late') == b'late'\n"
        "    open(sys.argv[2], 'w').close()\n"
    )
    order = [early, "atexit.register(end)\n"]
    assert run(code + "".join(order if when == "before" else reversed(order)), root, root.with_name("done")) == 0
    assert root.with_name("done").exists()
    wait_for((root / "late").exists)
    assert (root / "late").read_bytes() == b"late"


def test_files_are_saved_and_loaded_where_no_thread_can_be_had(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as the limit of processes allows are there, or the interpreter ends."""
    rekindle.save(b"first", root / "first")
    data = bytes(range(256)) * 200_000

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert rekindle.save(data, root / "x") == "memory"
    assert rekindle.load(root / "x") == data
