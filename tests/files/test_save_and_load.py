"""What is saved comes back, from memory and from the path, and anybody's torch.load reads it there."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.agent.file_drain import FileDrainer
from rekindle.format.layout import BLOCK
from rekindle.memory.files_dir import FilesDir


def state() -> dict[str, Any]:
    base = torch.arange(1000, dtype=torch.float32)
    return {
        "plain": torch.randn(17, 33),
        "half": torch.randn(5).to(torch.bfloat16),
        "views": [base[10:20], base[15:40].reshape(5, 5).t()],
        "empty": torch.empty(0, 7),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "flags": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "sparse": torch.eye(4).to_sparse(),
        "ordered": OrderedDict(a=1, b=(2.5, None, "text", {"x": [True]})),
        "large": torch.randint(0, 255, (2 * BLOCK + 12345,), dtype=torch.uint8),
    }


def forget(store: FilesDir) -> None:
    """Lets memory give all files up."""
    for file in store.kept.files():
        store.kept.remove(file)


def assert_same(found: Any, saved: Any) -> None:
    assert type(found) is type(saved)
    if isinstance(saved, torch.Tensor):
        assert found.dtype == saved.dtype and found.shape == saved.shape and found.layout == saved.layout
        assert torch.equal(found.to_dense(), saved.to_dense())
    elif isinstance(saved, dict):
        assert list(found) == list(saved)
        for key, value in saved.items():
            assert_same(found[key], value)
    elif isinstance(saved, (list, tuple)):
        assert len(found) == len(saved)
        for one, other in zip(found, saved, strict=True):
            assert_same(one, other)
    else:
        assert found == saved


def test_a_state_comes_back_from_memory_and_from_the_path(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    saved, path = state(), root / "deep" / "state.pt"
    assert rekindle.save(saved, path) == "memory"
    assert not path.exists() and [file.state for file in rekindle.files.status()] == ["memory"]
    assert_same(rekindle.load(path), saved)
    assert drainer.tick()
    assert [file.state for file in rekindle.files.status()] == ["both"]
    assert_same(rekindle.load(path), saved)
    forget(store)
    assert_same(rekindle.load(path), saved)


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_reads_what_arrives_as_if_it_had_written_it(drainer: FileDrainer, root: Path, mmap: bool) -> None:
    saved, path = state(), root / "state.pt"
    rekindle.save(saved, path)
    assert drainer.tick()
    found = torch.load(path, weights_only=True, mmap=mmap)
    assert_same(found, saved)
    assert found["views"][0].untyped_storage().data_ptr() == found["views"][1].untyped_storage().data_ptr()
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    theirs = io.BytesIO()
    torch.save(saved, theirs)
    with zipfile.ZipFile(theirs) as expected, zipfile.ZipFile(path) as archive:
        wanted = {name for name in archive.namelist()}
        assert wanted <= {name.replace(name.split("/")[0], "archive", 1) for name in expected.namelist()}
        assert archive.read("archive/data.pkl") == expected.read(f"{expected.namelist()[0].split('/')[0]}/data.pkl")


def test_what_torch_saved_is_loaded_and_verified(store: FilesDir, root: Path) -> None:
    saved, path = state(), root / "theirs.pt"
    root.mkdir()
    torch.save(saved, path)
    assert_same(rekindle.load(path), saved)


def test_files_without_crcs_are_loaded(store: FilesDir, root: Path) -> None:
    """As torch writes them when it is told to."""
    root.mkdir()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"x": torch.ones(5)}, root / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(rekindle.load(root / "x.pt")["x"], torch.ones(5))


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 99999, bytearray(b"abc"), memoryview(b"abcdef")[1:4]])
def test_bytes_are_stored_as_they_are(drainer: FileDrainer, root: Path, data: Any) -> None:
    path = root / "data.bin"
    rekindle.save(data, path)
    assert rekindle.load(path) == bytes(data)
    assert drainer.tick()
    assert path.read_bytes() == rekindle.load(path) == rekindle.load(path, raw=True) == bytes(data)


def test_bytes_that_memory_does_not_know_are_asked_for(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    rekindle.save(b"no checkpoint", root / "notes")
    assert drainer.tick()
    forget(store)
    with pytest.raises(rekindle.FormatError, match="raw=True"):
        rekindle.load(root / "notes")
    assert rekindle.load(root / "notes", raw=True) == b"no checkpoint"


def test_tensors_change_after_the_save_and_the_file_does_not(drainer: FileDrainer, root: Path) -> None:
    tensor = torch.zeros(3_000_000)
    rekindle.save({"x": tensor}, root / "x.pt")
    tensor.fill_(1)
    assert not rekindle.load(root / "x.pt")["x"].any()
    assert drainer.tick()
    assert not torch.load(root / "x.pt", weights_only=True)["x"].any()


def test_map_location_and_weights_only_are_torchs(store: FilesDir, root: Path) -> None:
    path = root / "x.pt"
    rekindle.save({"x": torch.ones(2), "args": argparse.Namespace(a=1)}, path)
    with pytest.raises(pickle.UnpicklingError):
        rekindle.load(path)
    assert rekindle.load(path, weights_only=False)["args"].a == 1
    assert rekindle.load(path, "meta", weights_only=False)["x"].device.type == "meta"
    assert rekindle.load(path, torch.device("cpu"), weights_only=False)["x"].device.type == "cpu"


def test_what_lies_on_a_device_is_copied_from_there(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here by the way of devices, with tensors of the host."""
    from rekindle.files import pickled

    real = pickled.of_storage

    def on_a_device(storage: Any, start: int) -> Any:
        class Storage:
            device = torch.device("cuda")

            def nbytes(self) -> int:
                return storage.nbytes()

        segment = real(Storage(), start)
        assert segment.put is not None and segment.address == 0

        def put(place: memoryview) -> None:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            torch.frombuffer(place, dtype=torch.uint8).copy_(whole)

        return type(segment)(start, segment.nbytes, 0, storage, put)

    monkeypatch.setattr(pickled, "of_storage", on_a_device)
    saved = state()
    rekindle.save(saved, root / "x.pt")
    assert_same(rekindle.load(root / "x.pt"), saved)
    assert drainer.tick()
    assert_same(torch.load(root / "x.pt", weights_only=True), saved)


def test_tensors_that_share_memory_as_different_types_are_refused_by_name(store: FilesDir, root: Path) -> None:
    base = torch.zeros(4)
    with pytest.raises(rekindle.UnsupportedValueError, match=r"float32 and as torch\.int32"):
        rekindle.save([base, base.view(torch.int32)], root / "x.pt")
    assert rekindle.files.status() == []


def test_a_relative_path_and_a_file_url_are_the_path(
    drainer: FileDrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rekindle.save(b"one", "x.bin")
    assert rekindle.load(tmp_path / "x.bin") == rekindle.load(f"file://{tmp_path}/x.bin") == b"one"
    (tmp_path / "link").symlink_to(tmp_path)
    assert rekindle.load(tmp_path / "link" / "x.bin") == b"one"


def test_a_link_is_followed_by_a_load(drainer: FileDrainer, root: Path) -> None:
    rekindle.save(b"five hundred", root / "step-500.bin")
    (root.parent / "latest").symlink_to(root / "step-500.bin")
    assert rekindle.load(root.parent / "latest") == b"five hundred"


def test_what_the_path_has_by_now_counts(drainer: FileDrainer, root: Path) -> None:
    """Another node, or a program without us, may have written there since."""
    path = root / "x.pt"
    rekindle.save({"step": 1}, path)
    assert drainer.tick()
    torch.save({"step": 2}, path)
    assert rekindle.load(path) == {"step": 2}
    path.unlink()
    with pytest.raises(rekindle.NotFoundError):
        rekindle.load(path)


def test_memory_is_taken_where_storage_does_not_answer(
    drainer: FileDrainer, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from rekindle.storage.path_place import PathPlace

    rekindle.save(b"data", root / "x")
    assert drainer.tick()

    def down(self: PathPlace) -> None:
        raise OSError(5, "Input/output error", str(self.path))

    monkeypatch.setattr(PathPlace, "identify", down)
    assert rekindle.load(root / "x") == b"data"
    assert "memory is taken" in caplog.text


def test_preload_brings_files_into_memory(store: FilesDir, root: Path) -> None:
    root.mkdir()
    saved = state()
    torch.save(saved, root / "x.pt")
    (root / "notes").write_bytes(b"notes")
    rekindle.files.preload(root / "x.pt", root / "notes")
    assert [(file.path, file.state) for file in rekindle.files.status()] == [
        (str(root / "x.pt"), "both"),
        (str(root / "notes"), "both"),
    ]
    inode = (root / "x.pt").stat().st_ino
    rekindle.files.preload(root / "x.pt")
    assert_same(rekindle.load(root / "x.pt"), saved)
    rekindle.flush(timeout=0)
    assert (root / "x.pt").stat().st_ino == inode  # it was not written again
    with pytest.raises(rekindle.FormatError, match="raw=True"):
        rekindle.load(root / "notes")


def test_a_placeholder_stands_for_a_new_file_only(drainer: FileDrainer, store: FilesDir, root: Path) -> None:
    path = root / "new.pt"
    rekindle.save({"step": 1}, path, placeholder=True)
    assert path.is_file() and not path.is_symlink() and path.read_bytes().startswith(b"rekindle placeholder: ")
    assert rekindle.load(path) == {"step": 1}
    assert [name for name in os.listdir(root) if name != path.name] == []
    assert drainer.tick()
    assert torch.load(path, weights_only=True) == {"step": 1}
    rekindle.save({"step": 2}, path, placeholder=True)
    assert torch.load(path, weights_only=True) == {"step": 1}


def test_a_placeholder_is_never_taken_for_the_file(store: FilesDir, drainer: FileDrainer, root: Path) -> None:
    rekindle.save({"step": 1}, root / "x.pt", placeholder=True)
    forget(store)  # as if the node were lost
    for load in (rekindle.load, rekindle.files.preload, lambda path: rekindle.load(path, raw=True)):
        with pytest.raises(rekindle.NotFoundError, match="placeholder"):
            load(root / "x.pt")


def test_neither_the_room_nor_its_saves_of_bytes_bring_torch(memory: Path, tmp_path: Path) -> None:
    code = (
        "import sys, rekindle, rekindle.files\n"
        "assert 'aiohttp' not in sys.modules\n"
        f"rekindle.save(b'x', {str(tmp_path / 'x')!r}); rekindle.flush(timeout=60)\n"
        f"assert rekindle.load({str(tmp_path / 'x')!r}) == b'x'\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_name_save_is_the_function_whatever_is_imported() -> None:
    code = (
        "import rekindle, rekindle.save.saver\n"
        "from rekindle.save import cadence\n"
        "assert rekindle.save.__name__ == 'save' and rekindle.save.__module__ == 'rekindle.files.saving'\n"
        "assert rekindle.Checkpointer and callable(rekindle.save) and callable(rekindle.files.configure)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
