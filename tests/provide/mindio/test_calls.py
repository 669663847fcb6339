"""The calls of mindio_acp: values that they return, and errors that they raise."""

from __future__ import annotations

import errno
import inspect
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.agent.file_drain import FileDrainer
from rekindle.faults.imports import IMPORTS
from rekindle.faults.torchelastic import LAUNCH
from rekindle.files.settings import current_settings
from rekindle.launch.provide import folder_of, stand_ins
from rekindle.memory.files_dir import FilesDir
from rekindle.provide import mindio_acp
from rekindle.provide.mindio_acp import earlier, flushing
from tests.faults.harness import wait_for
from tests.files.programs import KILLED, arrives, run
from tests.files.test_save_and_load import forget
from tests.provide.mindio.conftest import PROVIDED

NAMES = [
    "CheckpointHelper", "convert", "create_file", "flush", "initialize", "load", "multi_save", "open_file", "preload",
    "register_checker", "save",
]  # fmt: skip


def test_all_names_are_there_with_their_signatures() -> None:
    assert mindio_acp.__all__ == NAMES
    parameters = {name: list(inspect.signature(getattr(mindio_acp, name)).parameters) for name in NAMES}
    assert parameters["initialize"] == ["server_info"]
    assert parameters["save"] == ["obj", "path", "open_way"]
    assert parameters["multi_save"] == ["obj", "path_list"]
    assert parameters["load"] == ["path", "open_way", "map_location", "weights_only"]
    assert parameters["register_checker"] == ["callback", "check_dict", "user_context", "timeout_sec"]
    assert parameters["convert"] == ["src", "dst"]
    assert parameters["preload"] == parameters["open_file"] == ["path"]
    assert parameters["create_file"] == ["path", "mode"]
    assert parameters["flush"] == []
    assert parameters["CheckpointHelper"] == ["rank"]


@pytest.mark.parametrize(
    ("info", "result"),
    [
        (None, 0),
        ({}, 0),
        ({"memfs.data_block_pool_capacity_in_gb": "100", "memfs.write.parallel.enabled": "true"}, 0),
        ({"memfs.data_block_pool_capacity_in_gb": "0"}, -1),
        ({"memfs.data_block_pool_capacity_in_gb": "1025"}, -1),
        ({"memfs.data_block_pool_capacity_in_gb": "\u0663"}, -1),
        ({"memfs.data_block_pool_capacity_in_gb": 100}, -1),
        ({"memfs.write.parallel.enabled": "yes"}, -1),
        ({"background.backup.thread_num": "257"}, -1),
        ({"memfs.mount_path": "/mnt"}, -1),
    ],
)
def test_initialize(info: Any, result: int, store: FilesDir) -> None:
    assert mindio_acp.initialize(info) == mindio_acp.initialize(info) == result
    assert not store.path.exists(), "nothing is started before something is saved"


def test_the_capacity_is_a_bound_where_it_is_the_lesser(store: FilesDir, monkeypatch: pytest.MonkeyPatch) -> None:
    found = os.statvfs(os.environ["REKINDLE_MEMORY"])
    assert found.f_blocks * found.f_frsize > 4 << 30, "the test needs a memory store of more than 4 GiB"
    assert mindio_acp.initialize({"memfs.data_block_pool_capacity_in_gb": "1024"}) == 0
    assert current_settings().limit is None
    assert mindio_acp.initialize({"memfs.data_block_pool_capacity_in_gb": "1"}) == 0
    assert current_settings().limit == 1 << 30
    monkeypatch.setenv("REKINDLE_FILES_LIMIT", "3GiB")
    assert mindio_acp.initialize({"memfs.data_block_pool_capacity_in_gb": "2"}) == 0
    assert current_settings().limit == 3 << 30, "Rekindle's own setting counts"
    monkeypatch.setenv("REKINDLE_FILES_LIMIT", "nonsense")
    assert mindio_acp.initialize({"memfs.data_block_pool_capacity_in_gb": "2"}) == -1


def test_a_save_is_in_memory_and_arrives_as_a_file_of_torch(drainer: FileDrainer, root: Path) -> None:
    path = root / "x.pt"
    assert mindio_acp.save({"x": torch.ones(3)}, str(path)) == 1
    assert path.exists(), "programs look"
    assert torch.equal(mindio_acp.load(str(path))["x"], torch.ones(3))
    assert drainer.tick()
    assert torch.equal(torch.load(path, weights_only=True)["x"], torch.ones(3))


def test_another_way_than_memory_returns_when_it_is_on_storage(store: FilesDir, root: Path) -> None:
    assert mindio_acp.save({"step": 1}, str(root / "x.pt"), open_way="fopen") == 2
    assert torch.load(root / "x.pt", weights_only=True) == {"step": 1}
    assert mindio_acp.load(str(root / "x.pt"), "fopen") == {"step": 1}


def test_a_save_that_finds_memory_full_is_written(drainer: FileDrainer, root: Path) -> None:
    rekindle.files.configure(limit=1000)
    assert mindio_acp.save({"x": torch.ones(3000)}, str(root / "x.pt")) == 2
    assert torch.load(root / "x.pt", weights_only=True)["x"].sum() == 3000
    with mindio_acp.create_file(str(root / "y")) as file:
        file.write(bytes(3000))
    assert (root / "y").read_bytes() == bytes(3000)


@pytest.mark.parametrize("bad", ["", "dir", "file/below", "n" * 300, "a\0b", "link"])
def test_a_path_that_is_none_is_a_runtime_error(bad: str, drainer: FileDrainer, root: Path) -> None:
    root.mkdir()
    (root / "dir").mkdir()
    (root / "file").write_bytes(b"kept")
    (root / "link").symlink_to("file")
    path = str(root / bad) if bad else bad
    with pytest.raises(RuntimeError, match="was not saved") as caught:
        mindio_acp.save(b"x", path)
    assert isinstance(caught.value.__cause__, rekindle.UsageError)
    with pytest.raises(RuntimeError, match="was not saved"):
        mindio_acp.create_file(path).close()
    if bad != "link":
        with pytest.raises(RuntimeError):
            mindio_acp.load(path)
        with pytest.raises(RuntimeError):
            mindio_acp.open_file(path)
    assert rekindle.files.status() == [] and (root / "file").read_bytes() == b"kept"


def test_a_path_may_be_an_object(drainer: FileDrainer, root: Path) -> None:
    assert mindio_acp.save(b"x", root / "x") == 1  # type: ignore[arg-type]
    assert mindio_acp.load(root / "x") == b"x"  # type: ignore[arg-type]
    for call in (lambda: mindio_acp.save(b"x", root), lambda: mindio_acp.load(root)):  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="is a directory"):
            call()
    mindio_acp.CheckpointHelper(0).save_model_checkpoint(root / "m.pt", {"x": 1})  # type: ignore[arg-type]
    wait_for(lambda: len(rekindle.files.status()) == 2)


class Gone:
    pass


def test_an_object_whose_class_is_gone_is_a_runtime_error(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mindio_acp.save(Gone(), str(root / "x.pt"))
    monkeypatch.delattr(sys.modules[__name__], "Gone")
    with pytest.raises(RuntimeError, match=r"x\.pt: AttributeError.*Gone"):
        mindio_acp.load(str(root / "x.pt"), weights_only=False)


def test_several_paths(drainer: FileDrainer, root: Path) -> None:
    paths = [str(root / f"rank_{number}" / "x.pt") for number in range(3)]
    assert mindio_acp.multi_save({"x": torch.ones(3)}, paths) == 1
    while drainer.tick():
        pass
    assert all(torch.equal(torch.load(path, weights_only=True)["x"], torch.ones(3)) for path in paths)
    assert mindio_acp.multi_save({}, []) == 0
    for bad in (None, "x", (paths[0],), [paths[0], "n" * 1025], [17]):
        assert mindio_acp.multi_save({}, bad) is None  # type: ignore[arg-type]


def test_a_file_is_written_in_chunks_and_read(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    path = str(root / "x.ckpt")
    with mindio_acp.create_file(path) as file:
        chunk = bytearray(b"0123456789")
        assert [file.write(chunk), file.write(b""), file.write(b"abc")] == [0, 0, 0]  # type: ignore[arg-type]
        chunk[:] = bytes(10)
        assert not Path(path).exists()
    assert Path(path).exists() and os.stat(path).st_mode & 0o777 == 0o600
    for _ in ("in memory", "on storage"):
        with mindio_acp.open_file(path) as found:
            assert found.read() == b"0123456789abc"
            assert found.read(10) == b"abc" and found.read(1, 2) == b"12" and found.read(13) == b""
            for offset, count in ((14, -1), (-1, 2), (12, 2)):
                with pytest.raises(RuntimeError, match="has no bytes"):
                    found.read(offset, count)
        with pytest.raises(RuntimeError, match="is closed"):
            found.read()
        drainer.tick()
        forget(store)
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_a_file_that_fails_half_way_leaves_the_old_one(drainer: FileDrainer, root: Path) -> None:
    path = str(root / "x")
    with mindio_acp.create_file(path) as file:
        file.write(b"old")
    with pytest.raises(ZeroDivisionError), mindio_acp.create_file(path) as file:
        file.write(b"ne")
        raise ZeroDivisionError
    dropped = mindio_acp.create_file(path)
    dropped.write(b"ne")
    dropped.drop()
    dropped.close()
    with pytest.raises(RuntimeError, match="is closed"):
        dropped.write(b"w")
    assert mindio_acp.open_file(path).read() == b"old"
    assert drainer.tick() and Path(path).read_bytes() == b"old"


def test_a_checkpoint_that_was_removed_on_its_way_does_not_come_back(drainer: FileDrainer, root: Path) -> None:
    """Programs keep so many of them, and remove the oldest, arrived or not."""
    for number in range(3):
        with mindio_acp.create_file(str(root / f"net-{number}.ckpt")) as file:
            file.write(b"%d" % number)
    os.remove(root / "net-0.ckpt")
    while drainer.tick():
        pass
    assert sorted(os.listdir(root)) == ["net-1.ckpt", "net-2.ckpt"]
    assert [Path(file.path).name for file in rekindle.files.status()] == ["net-1.ckpt", "net-2.ckpt"]


def test_preload_brings_files_into_memory(store: FilesDir, drainer: FileDrainer, root: Path) -> None:
    root.mkdir()
    torch.save({"step": 1}, root / "x.pt")
    assert mindio_acp.preload(str(root / "x.pt")) == 0
    assert mindio_acp.load(str(root / "x.pt")) == {"step": 1}
    assert [(Path(file.path).name, file.state) for file in rekindle.files.status()] == [("x.pt", "both")]
    for bad in ((), ("n" * 1025,), (17,), (str(root / "none"),), (str(root / "x.pt"), str(root / "none")), ("a\0b",)):
        assert mindio_acp.preload(*bad) == 1  # type: ignore[arg-type]


def test_a_file_that_is_lost_is_told_of_with_those_that_are_not(drainer: FileDrainer, store: FilesDir, root: Path):
    saved = [str(root / f"iter_{number:07}" / "mp_rank_00" / "model.pt") for number in (100, 200)]
    for path in saved:
        assert mindio_acp.save({"x": path}, path) == 1
        if path == saved[0]:
            assert drainer.tick()
    forget(store)  # as when the node is lost
    with pytest.raises(RuntimeError, match=r"placeholder.*the newest first: .*iter_0000100/mp_rank_00/model.pt"):
        mindio_acp.load(saved[1])
    with pytest.raises(RuntimeError, match="iter_0000100"):
        mindio_acp.open_file(str(root / "iter_0000300" / "mp_rank_00" / "model.pt"))


def test_a_save_waits_for_the_checkpoint_before(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tracker is written when it returns: no more than one of those may be ahead of storage."""

    def path(number: int, rank: int, name: str) -> str:
        return str(root / f"iter_{number}" / f"mp_{rank}" / name)

    for name in ("model.pt", "optimizer.pt"):
        assert mindio_acp.save({"x": 1}, path(1, 0, name)) == 1
    assert len(rekindle.files.status()) == 2, "files of one checkpoint don't wait for each other"
    thread = threading.Thread(target=mindio_acp.save, args=({"x": 2}, path(2, 0, "model.pt")))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive() and not Path(path(2, 0, "model.pt")).exists()
    while drainer.tick():
        pass
    thread.join(60)
    assert not thread.is_alive()
    assert mindio_acp.save({"x": 2}, path(2, 1, "model.pt")) == 1, "the number that changes is known by now"
    monkeypatch.setattr(earlier, "_LONGEST", 0.2)
    assert mindio_acp.save({"x": 3}, path(3, 0, "model.pt")) == 1, "and no wait is without a bound"


def test_a_save_does_not_wait_for_storage_that_fails(
    drainer: FileDrainer, store: FilesDir, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root.mkdir()
    assert mindio_acp.save({"x": 1}, str(root / "iter_1" / "x.pt")) == 1
    os.unlink(root / "iter_1" / "x.pt")
    os.rmdir(root / "iter_1")
    (root / "iter_1").write_bytes(b"a file in the way")
    assert not drainer.tick()
    store.notes.write_agent_status({"error": None, "failed": drainer.progress.failed})
    assert mindio_acp.save({"x": 2}, str(root / "iter_2" / "x.pt")) == 1
    assert "both would be lost with this node" in caplog.text


def test_checkers(drainer: FileDrainer, root: Path) -> None:
    for number in range(3):
        assert mindio_acp.save({"x": number}, str(root / "iter_1" / f"{number}.pt")) == 1
    results: list[tuple[int, str]] = []

    def callback(result: int, context: str) -> None:
        results.append((result, context))

    for name, count in (("whole", 3), ("too many", 2)):
        assert mindio_acp.register_checker(callback, {str(root / "iter_1"): count}, name, 60) == 1
    assert mindio_acp.register_checker(callback, {str(root): 9}, "too few", 1) == 1
    wait_for(lambda: results)
    assert results == [(-errno.ETIMEDOUT, "too few")], "placeholders are no files"
    while drainer.tick():
        pass
    wait_for(lambda: len(results) == 3)
    assert sorted(results) == [(-errno.ETIMEDOUT, "too few"), (-errno.EFBIG, "too many"), (0, "whole")]
    assert mindio_acp.flush() == 0


@pytest.mark.parametrize(
    ("callback", "wanted", "seconds"),
    [
        (print, {"/": 1}, 0),
        (print, {"/": 1}, 3601),
        (print, {"/": 1}, 1.5),
        (print, {"/": 1}, True),
        (17, {"/": 1}, 10),
        (print, {}, 10),
        (print, ["/"], 10),
        (print, {"/": 0}, 10),
        (print, {"/": "1"}, 10),
        (print, {"/nowhere": 1}, 10),
        (print, {17: 1}, 10),
    ],
)
def test_what_can_not_be_watched(callback: Any, wanted: Any, seconds: Any) -> None:
    assert mindio_acp.register_checker(callback, wanted, None, seconds) is None


def test_flush(drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flushing, "_LONGEST", 0.2)
    assert mindio_acp.flush() == 0
    mindio_acp.save({"x": 1}, str(root / "x.pt"))
    assert mindio_acp.flush() == 1
    assert drainer.tick() and mindio_acp.flush() == 0


def test_what_runs_in_the_background_may_flush(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for all others, and not for itself."""
    monkeypatch.setattr(flushing, "_LONGEST", 20.0)
    helper, results = mindio_acp.CheckpointHelper(0), []

    def save_and_flush(kwargs: dict[str, str]) -> None:
        helper.wait_d2h_finished()
        results.append(mindio_acp.flush())

    helper.async_save_checkpoint(save_and_flush, {})
    wait_for(lambda: results)
    (root / "iter").mkdir(parents=True)
    for context in range(2):
        assert mindio_acp.register_checker(
            lambda *result: results.append(mindio_acp.flush()), {str(root / "iter"): 1}, context, 60
        )
    (root / "iter" / "x").write_bytes(b"a file")
    wait_for(lambda: len(results) == 3)
    assert results == [0, 0, 0]


def test_a_launcher_is_told_what_was_imported(
    store: FilesDir, root: Path, tmp_path: Path, provided: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a restart of a script that saves here alone is warm."""
    monkeypatch.setenv(LAUNCH, str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    code = "import mindio_acp, wave\nwith mindio_acp.create_file(sys.argv[1]) as file: file.write(b'x')\n"
    assert run(code, root / "x", fresh=True) == 0
    arrives(store)
    assert "wave" in json.loads((tmp_path / IMPORTS).read_bytes())["modules"]


def test_twenty_of_twenty_arrive_after_a_sigkill_right_after_the_save(
    store: FilesDir, root: Path, provided: None
) -> None:
    code = (
        "import mindio_acp\n"
        "assert mindio_acp.initialize() == 0\n"
        "for n in range(20):\n"
        "    with mindio_acp.create_file(f'{sys.argv[1]}/net-1_{n}.ckpt') as f: f.write(b'%d' % n * 1000 * n)\n"
        "assert 'torch' not in sys.modules\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert run(code, root, fresh=True) == KILLED
    arrives(store)
    for number in range(20):
        assert (root / f"net-1_{number}.ckpt").read_bytes() == b"%d" % number * 1000 * number


def test_the_foreign_name_is_the_same_module(provided: None) -> None:
    import mindio_acp as foreign

    assert foreign is mindio_acp


def test_a_run_can_be_given_it() -> None:
    assert "mindio_acp" in stand_ins() and folder_of("mindio_acp") == PROVIDED / "mindio_acp"


@pytest.mark.campaign(seconds=10)
def test_the_import_changes_nothing(memory: Path, provided: None) -> None:
    look = "dict(vars(torch.Tensor)), list(sys.path), dict(os.environ), torch.save, torch.load"
    code = (
        f"import os, sys, torch\nmethods, *before = {look}\nimport mindio_acp\nmindio_acp.initialize()\n"
        f"after, *now = {look}\n"
        "assert now == before and all(after[name] is method for name, method in methods.items())\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
