"""Defects that MindIO's own package has, each test named after one, and numbered by its kind.

1 an upload that fails, 2 a flush that says too much, 3 a close that fails, 4 a read that fails, 5 damage, 6 torn files,
7 code in pickles, 8 values, 9 failures behind the training, 10 the tracker, 11 limits, 13 devices, 14 forks,
15 preload, 17 who is told. Of 5 and 7 in its own files: test_format.py. Of 12 and 16, no versions and no isolation,
there is nothing to show.
"""

from __future__ import annotations

import argparse
import errno
import os
import pickle
import random
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rekindle
from rekindle.agent.file_drain import FileDrainer
from rekindle.memory.files_dir import FilesDir
from rekindle.provide import mindio_acp
from rekindle.provide.mindio_acp import checking, flushing, harmless
from rekindle.storage import disk
from tests.faults.harness import wait_for
from tests.files.programs import KILLED, run
from tests.files.test_bad_input import flip
from tests.files.test_defects import Clock, Fault


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("can't be pickled")


@pytest.mark.parametrize("call", ["create_new", "fsync", "rename"])
def test_01_one_failed_upload_loses_the_checkpoint(
    call: str, drainer: FileDrainer, store: FilesDir, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its copy in memory, and the next upload brings it."""
    path, clock = str(root / "x.pt"), Clock()
    assert mindio_acp.save({"step": 1}, path) == 1
    drainer = FileDrainer(store, clock)
    Fault(monkeypatch, call, errno.EIO, times=1)
    assert not drainer.tick()
    assert mindio_acp.load(path) == {"step": 1}
    clock.now += 60
    assert drainer.tick() and torch.load(path, weights_only=True) == {"step": 1}


def test_02_flush_is_0_while_an_upload_waits_for_its_next_try(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flushing, "_LONGEST", 0.2)
    Fault(monkeypatch, "fsync", errno.EIO, times=1)
    mindio_acp.save({"step": 1}, str(root / "x.pt"))
    assert not drainer.tick()
    assert mindio_acp.flush() == 1


def test_02_flush_is_0_after_the_server_has_died_with_the_data(
    drainer: FileDrainer, store: FilesDir, root: Path
) -> None:
    mindio_acp.save({"step": 1}, str(root / "x.pt"))
    shutil.rmtree(store.kept_path)
    assert mindio_acp.flush() == 1


def test_03_a_save_returns_1_though_its_commit_failed(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rekindle.memory.kept.write_atomic", full)
    assert mindio_acp.save({"step": 1}, str(root / "x.pt")) == 2
    assert torch.load(root / "x.pt", weights_only=True) == {"step": 1}
    monkeypatch.setattr(disk, "fsync", full)
    for save in (
        lambda: mindio_acp.save({"step": 2}, str(root / "x.pt")),
        mindio_acp.create_file(str(root / "y")).close,
    ):
        with pytest.raises(RuntimeError, match="No space left"):
            save()
    assert torch.load(root / "x.pt", weights_only=True) == {"step": 1} and not (root / "y").exists()


def test_04_a_failed_read_gives_uninitialised_tensors(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    mindio_acp.save({"x": torch.ones(300_000)}, str(root / "x.pt"))
    (file,) = store.kept.files()
    os.truncate(file.data, 500_000)
    with pytest.raises(RuntimeError, match="has 500,000 bytes"):
        mindio_acp.load(str(root / "x.pt"))


@pytest.mark.parametrize("stored", [False, True])
def test_05_a_flipped_bit_is_loaded(stored: bool, drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    path = str(root / "x.pt")
    mindio_acp.save({"x": torch.ones(300_000)}, path)
    assert not stored or drainer.tick()
    flip(store)
    if stored:
        assert torch.equal(mindio_acp.load(path)["x"], torch.ones(300_000))
    else:
        with pytest.raises(RuntimeError, match="differs from its checksum"):
            mindio_acp.load(path)
        with pytest.raises(RuntimeError, match="differs from its checksum"):
            mindio_acp.open_file(path)


def test_06_a_writer_that_dies_leaves_a_torn_file(store: FilesDir, root: Path, provided: None) -> None:
    """At its final name, over the old file: here when memory is full, so that it writes to the path itself."""
    path = root / "x"
    code = (
        "import mindio_acp\n"
        "rekindle.files.configure(limit=1)\n"
        "for part in (b'old', b'new' * 99_999):\n"
        "    if part != b'old': rekindle.common.failpoints.arm('upload.written')\n"
        "    with mindio_acp.create_file(sys.argv[1]) as file: file.write(part)\n"
    )
    assert run("import rekindle.common.failpoints\n" + code, path) == KILLED
    assert path.read_bytes() == b"old" == mindio_acp.open_file(str(path)).read()


def test_06_a_load_takes_a_file_that_has_not_arrived(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    path = str(root / "x.pt")
    mindio_acp.save({"step": 1}, path)
    (file,) = store.kept.files()
    store.kept.remove(file)  # as if its node were gone
    for load in (mindio_acp.load, mindio_acp.open_file):
        with pytest.raises(RuntimeError, match="placeholder of a file that has not arrived"):
            load(path)
    assert mindio_acp.register_checker(lambda *result: results.append(result), {str(root): 1}, "x", 1) == 1
    results: list[Any] = []
    wait_for(lambda: results)
    assert results == [(-errno.ETIMEDOUT, "x")]


def test_07_a_fork_during_a_load_leaves_the_child_waiting(drainer: FileDrainer, root: Path) -> None:
    """Or trusting what the load had let in."""
    mindio_acp.save({"args": argparse.Namespace(lr=1)}, str(root / "x.pt"))
    before = set(torch.serialization.get_safe_globals())
    with harmless.harmless(), harmless._lock:
        child = os.fork()
        if not child:
            signal.alarm(60)
            try:
                found = mindio_acp.load(str(root / "x.pt"))
                os._exit(0 if found["args"].lr == 1 and set(torch.serialization.get_safe_globals()) == before else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0


def test_08_empty_tensors_and_the_states_of_megatron_can_not_be_loaded(drainer: FileDrainer, root: Path) -> None:
    path, rng = str(root / "x.pt"), np.random.RandomState(7)
    state = {
        "empty": torch.empty(0),
        "args": argparse.Namespace(lr=1),
        "rng_state": [{"np_rng_state": rng.get_state(), "random_rng_state": random.getstate()}],
        "arrays": [
            np.arange(6.0).reshape(2, 3).T,
            np.array([], "i2"),
            np.array([5], ">i2"),
            np.array(3 + 4j),
            np.array([True, False]),
        ],
        "loss": np.float64(0.5),
    }
    assert mindio_acp.save(state, path) == 1
    for _ in ("from memory", "from storage"):
        found = mindio_acp.load(path)
        assert found["empty"].numel() == 0 and found["args"].lr == 1 and found["loss"] == 0.5
        other = np.random.RandomState(1)
        other.set_state(found["rng_state"][0]["np_rng_state"])
        assert other.rand() == np.random.RandomState(7).rand()
        for one, expected in zip(found["arrays"], pickle.loads(pickle.dumps(state["arrays"])), strict=True):
            assert one.dtype == expected.dtype and np.array_equal(one, expected)
            assert type(pickle.loads(pickle.dumps(one))) is np.ndarray
        drainer.tick()


class Forged:
    """Pickled as a call of a class or function of NumPy."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize(
    "value",
    [
        Forged(np.ndarray, (1,), "f8", bytes(8)),
        Forged(np.ndarray, (1 << 40,)),
        Forged(bytes, 1 << 40),
        Forged(np.dtype, "O"),
        Forged(np.dtype, [("f", "O")]),
    ],
    ids=["buffer", "shape", "bytes", "dtype", "fields"],
)
def test_07_what_is_let_in_can_be_called_at_will(value: Forged, drainer: FileDrainer, root: Path) -> None:
    mindio_acp.save({"value": value}, str(root / "x.pt"))
    with pytest.raises(RuntimeError):
        mindio_acp.load(str(root / "x.pt"))


@pytest.mark.parametrize("array", [np.array([{}], object), np.array(["text"]), np.zeros(2, "i4,f4")])
def test_07_arrays_that_are_not_of_numbers_are_loaded_unasked(array: Any, drainer: FileDrainer, root: Path) -> None:
    """A forged one would have its bytes taken for addresses."""
    mindio_acp.save({"array": array}, str(root / "x.pt"))
    with pytest.raises(RuntimeError):
        mindio_acp.load(str(root / "x.pt"))
    assert len(mindio_acp.load(str(root / "x.pt"), weights_only=False)["array"]) == len(array)


def test_07_a_dtype_by_itself_is_loaded_as_something_else(drainer: FileDrainer, root: Path) -> None:
    mindio_acp.save({"dtype": np.dtype("f4")}, str(root / "x.pt"))
    with pytest.raises(RuntimeError, match="weights_only=False"):
        mindio_acp.load(str(root / "x.pt"))


def test_07_a_load_changes_what_torch_trusts(drainer: FileDrainer, root: Path) -> None:
    mindio_acp.save({"args": argparse.Namespace(lr=1)}, str(root / "x.pt"))
    for mine in ([], [argparse.Namespace]):
        with torch.serialization.safe_globals(mine):
            before = set(torch.serialization.get_safe_globals())
            threads = [threading.Thread(target=mindio_acp.load, args=(str(root / "x.pt"),)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert set(torch.serialization.get_safe_globals()) == before


def test_09_a_background_save_that_fails_hangs_the_training(drainer: FileDrainer, root: Path) -> None:
    helper = mindio_acp.CheckpointHelper(0)

    def fails(*arguments: object) -> None:
        raise RuntimeError("gather failed")

    helper.save_model_checkpoint(str(root / "a.pt"), {"x": Unpicklable()})
    helper.save_optimizer_checkpoint(str(root / "b.pt"), lambda: fails())
    helper.async_save_checkpoint(fails, {})
    helper.wait_d2h_finished()
    helper.async_checkpoint_count()
    helper.save_model_checkpoint(str(root / "c.pt"), {"x": 1})
    helper.wait_d2h_finished()
    wait_for(lambda: drainer.tick())
    assert mindio_acp.flush() == 1, "a save has failed"
    assert mindio_acp.flush() == 0, "and that was told"
    assert os.listdir(root) == ["c.pt"]


@pytest.mark.parametrize(("before", "iteration"), [("release", 100), ("1000", 900), ("", 1), (None, 7)])
def test_10_a_tracker_keeps_the_end_of_the_longer_text(
    before: str | None, iteration: int, drainer: FileDrainer, root: Path
) -> None:
    root.mkdir()
    tracker = root / "latest_checkpointed_iteration.txt"
    if before is not None:
        tracker.write_text(before)
    (root / "iter").mkdir()
    (root / "iter" / "x.pt").write_bytes(b"a file")
    results: list[tuple[int, int]] = []
    mindio_acp.CheckpointHelper(0).async_write_tracker_file(
        iteration, str(root / "iter"), 1, str(tracker), lambda *result: results.append(result)
    )
    wait_for(lambda: results)
    assert results == [(iteration, 0)] and tracker.read_text() == str(iteration)


def test_10_a_tracker_goes_back(drainer: FileDrainer, root: Path) -> None:
    """When the watch of an older iteration ends after that of a newer one."""
    root.mkdir()
    tracker, results = root / "latest_checkpointed_iteration.txt", []
    helper = mindio_acp.CheckpointHelper(0)
    for iteration in (200, 100):
        (root / f"iter_{iteration}").mkdir()
        helper.async_write_tracker_file(
            iteration, str(root / f"iter_{iteration}"), 1, str(tracker), lambda *result: results.append(result)
        )
    for iteration in (200, 100):
        (root / f"iter_{iteration}" / "x.pt").write_bytes(b"a file")
        wait_for(lambda iteration=iteration: (iteration, 0) in results)
    assert tracker.read_text() == "200"


def test_10_a_tracker_is_written_before_the_files_are_on_storage(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = root / "latest_checkpointed_iteration.txt"
    helper, results = mindio_acp.CheckpointHelper(0), []
    helper.save_model_checkpoint(str(root / "iter_1" / "x.pt"), {"x": 1})
    helper.wait_d2h_finished()
    wait_for((root / "iter_1" / "x.pt").exists)
    helper.async_write_tracker_file(1, str(root / "iter_1"), 1, str(tracker), lambda *result: results.append(result))
    time.sleep(3 * checking._LOOK_EVERY)
    assert not tracker.exists()
    wait_for(lambda: drainer.tick())
    wait_for(lambda: results)
    assert tracker.read_text() == "1"


def test_11_more_than_a_thousand_files_can_not_be_watched(store: FilesDir, root: Path) -> None:
    for rank in range(11):
        (root / f"mp_{rank}").mkdir(parents=True)
        for number in range(100):
            (root / f"mp_{rank}" / f"{number}.pt").write_bytes(b"a file")
    results: list[Any] = []
    assert mindio_acp.register_checker(lambda *result: results.append(result), {str(root): 1100}, 7, 60) == 1
    wait_for(lambda: results)
    assert results == [(0, 7)]


def test_11_a_second_watch_replaces_the_callback_of_the_first(store: FilesDir, root: Path) -> None:
    root.mkdir()
    first: list[Any] = []
    second: list[Any] = []
    assert mindio_acp.register_checker(lambda *result: first.append(result), {str(root): 1}, 1, 60) == 1
    assert mindio_acp.register_checker(lambda *result: second.append(result), {str(root): 1}, 2, 60) == 1
    (root / "x").write_bytes(b"a file")
    wait_for(lambda: first and second)
    assert (first, second) == ([(0, 1)], [(0, 2)])


def test_13_devices_other_than_one_vendors_are_refused(drainer: FileDrainer, root: Path) -> None:
    """No vendor's module is asked for: a storage of any device copies itself."""
    mindio_acp.save({"x": torch.ones(3)}, str(root / "x.pt"))
    mindio_acp.CheckpointHelper(0).get_checkpoint_copy_stream()
    assert "torch_npu" not in sys.modules


def test_14_a_server_that_can_not_start_leaves_a_second_trainer(store: FilesDir, root: Path, no_agent: None) -> None:
    pid = os.getpid()
    assert mindio_acp.initialize() == 0
    assert mindio_acp.save({"step": 1}, str(root / "x.pt")) == 1
    assert mindio_acp.flush() == 0 and os.getpid() == pid
    assert torch.load(root / "x.pt", weights_only=True) == {"step": 1}


def test_14_a_forked_worker_can_not_save(drainer: FileDrainer, root: Path) -> None:
    """It writes to the path itself, behind what its parent has saved there."""
    path = str(root / "x")
    with mindio_acp.create_file(path) as file:
        file.write(b"of the parent")
    child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            with mindio_acp.create_file(path) as file:
                file.write(b"of the child")
            done = (
                mindio_acp.save(b"of the child", path + ".2") == 2 and mindio_acp.load(path + ".2") == b"of the child"
            )
            os._exit(0 if done else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert Path(path).read_bytes() == b"of the child" == mindio_acp.open_file(path).read()
    drainer.tick()
    assert Path(path).read_bytes() == b"of the child", "the older one is not carried over it"


def test_15_a_failed_preload_keeps_later_loads_waiting(drainer: FileDrainer, root: Path) -> None:
    root.mkdir()
    torch.save({"step": 1}, root / "x.pt")
    sound = (root / "x.pt").read_bytes()
    (root / "x.pt").write_bytes(sound[:-100])
    assert mindio_acp.preload(str(root / "x.pt")) == 0
    with pytest.raises(RuntimeError):
        mindio_acp.load(str(root / "x.pt"))
    (root / "x.pt").write_bytes(sound)
    began = time.monotonic()
    assert mindio_acp.load(str(root / "x.pt")) == {"step": 1} and time.monotonic() - began < 10


def test_17_nobody_is_told_what_has_not_arrived(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flushing, "_LONGEST", 0.2)
    mindio_acp.save({"x": 1}, str(root / "x.pt"))
    assert [(file.path, file.state) for file in rekindle.files.status()] == [(str(root / "x.pt"), "memory")]
    assert mindio_acp.flush() == 1 and "x.pt" in caplog.text


def test_09_a_gather_waits_for_the_copy_of_all_of_it(drainer: FileDrainer, root: Path) -> None:
    """The update may begin once the function has said that it has its copy, while that is still being saved."""
    helper, go_on = mindio_acp.CheckpointHelper(0), threading.Event()

    def gather(notify_callback: Any) -> dict[str, int]:
        notify_callback()
        go_on.wait(60)
        return {"x": 1}

    helper.save_optimizer_checkpoint([str(root / "mp_0" / "o.pt"), str(root / "mp_1" / "o.pt")], gather)
    helper.wait_d2h_finished()
    assert not root.exists()
    go_on.set()
    wait_for(lambda: len(rekindle.files.status()) == 2)
    helper.save_optimizer_checkpoint(str(root / "nothing.pt"), lambda: None)
    for bad in (lambda x: x, lambda notify_callback, x: x):
        with pytest.raises(ValueError, match="must take nothing, or notify_callback"):
            helper.save_optimizer_checkpoint(str(root / "x.pt"), bad)
    assert mindio_acp.CheckpointHelper(3) is helper
