"""Files that MindIO itself has written, and files that are none: loaded, converted, or refused by name."""

from __future__ import annotations

import argparse
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.agent.file_drain import FileDrainer
from rekindle.memory.files_dir import FilesDir
from rekindle.provide import mindio_acp
from tests.files.test_bad_input import Evil
from tests.files.test_save_and_load import forget
from tests.provide.mindio import original


def state() -> dict[str, Any]:
    torch.manual_seed(3)
    weight = torch.randn(301, 7)
    return {
        "weight": weight,
        "tied": weight,
        "row": weight[3],
        "half": torch.randn(5).bfloat16(),
        "whole": torch.arange(4, dtype=torch.int64),
        "args": argparse.Namespace(lr=0.1),
        "iteration": 7,
    }


def same(found: Any, expected: dict[str, Any]) -> bool:
    tensors = [name for name in expected if isinstance(expected[name], torch.Tensor)]
    return all(torch.equal(found[name], expected[name]) for name in tensors) and all(
        found[name] == expected[name] for name in expected if name not in tensors
    )


@pytest.fixture
def written(store: FilesDir, root: Path) -> Path:
    root.mkdir()
    (root / "x.pt").write_bytes(original.of_object(state()))
    return root / "x.pt"


@pytest.mark.parametrize("preloaded", [False, True])
@pytest.mark.parametrize("where", [None, "cpu", torch.device("cpu"), {"cpu": "cpu"}])
def test_files_of_the_original_are_loaded(preloaded: bool, where: Any, written: Path) -> None:
    if preloaded:
        assert mindio_acp.preload(str(written)) == 0
    found = mindio_acp.load(str(written), map_location=where)
    assert same(found, state())
    assert found["row"].data_ptr() == found["weight"][3].data_ptr(), "what shared memory shares it again"


def test_an_empty_tensor_in_a_file_of_the_original(store: FilesDir, root: Path) -> None:
    root.mkdir()
    (root / "x.pt").write_bytes(original.of_object({"empty": torch.empty(0, 3), "x": torch.ones(2)}))
    assert mindio_acp.load(str(root / "x.pt"))["empty"].shape == (0, 3)


def test_files_of_the_original_are_converted(written: Path) -> None:
    to = written.with_name("y.pt")
    assert mindio_acp.convert(str(written), str(to)) == 0
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert same(torch.load(to, weights_only=True), state())
    assert same(rekindle.load(to, weights_only=False), state()), "it has checksums, and they are right"


def test_bytes_of_the_original_and_ours_are_bytes_wherever_they_are(
    store: FilesDir, drainer: FileDrainer, root: Path
) -> None:
    data, path = os.urandom(70_000), str(root / "x")
    assert mindio_acp.save(data, path) == 1
    assert mindio_acp.load(path) == data
    assert drainer.tick()
    forget(store)
    assert mindio_acp.load(path) == data
    for ours in (b"", data):
        Path(path).write_bytes(original.of_bytes(ours))
        assert mindio_acp.load(path) == ours
    assert mindio_acp.convert(path, str(root / "y")) == -1


def test_files_of_torch_are_loaded(store: FilesDir, root: Path) -> None:
    root.mkdir()
    for zipped in (True, False):
        torch.save(state(), root / "x.pt", _use_new_zipfile_serialization=zipped)
        assert same(mindio_acp.load(str(root / "x.pt")), state())


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is cut off|neither"),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), "neither a file of torch.save nor of MindIO"),
        (b"mindio\0", "neither"),
        (original.wrapped(b"body", {"data.pkl": (0, 4)}, at=1 << 60), "cut off or damaged"),
        (original.wrapped(b"body", {"data.pkl": (0, 4)}, nbytes=1 << 63), "cut off or damaged"),
        (original.wrapped(b"body", b"no pickle"), "table can't be read"),
        (original.wrapped(b"body", ["data.pkl"]), "doesn't fit"),
        (original.wrapped(b"body", {"data/0": (0, 4)}), "doesn't fit"),
        (original.wrapped(b"body", {"data.pkl": (0, 1 << 40)}), "doesn't fit"),
        (original.wrapped(b"body", {"data.pkl": (-4, 8)}), "doesn't fit"),
        (original.wrapped(b"body", {"data.pkl": (0, "4")}), "doesn't fit"),
        (original.wrapped(b"body", {"data.pkl": [0, 4]}), "doesn't fit"),
        (original.wrapped(b"body", {"mindio_save_data_type": "directly_bytes", "bytes_length": 5}), "doesn't fit"),
    ],
)
def test_what_is_no_checkpoint(data: bytes, why: str, store: FilesDir, root: Path) -> None:
    root.mkdir()
    (root / "x").write_bytes(data)
    with pytest.raises(RuntimeError, match=why) as caught:
        mindio_acp.load(str(root / "x"))
    assert isinstance(caught.value.__cause__, rekindle.CorruptError)
    assert mindio_acp.convert(str(root / "x"), str(root / "y")) == -1
    assert os.listdir(root) == ["x"]


@pytest.mark.parametrize("part", [0.1, 0.5, 0.97])
def test_a_file_of_the_original_that_was_cut_off(part: float, written: Path) -> None:
    os.truncate(written, int(part * written.stat().st_size))
    with pytest.raises(RuntimeError, match="neither"):
        mindio_acp.load(str(written))


def test_damage_of_bytes_is_seen(store: FilesDir, drainer: FileDrainer, root: Path) -> None:
    assert mindio_acp.save(bytes(1000), str(root / "x")) == 1 and drainer.tick()
    forget(store)
    data = bytearray((root / "x").read_bytes())
    data[500] ^= 1
    (root / "x").write_bytes(data)
    with pytest.raises(RuntimeError, match="differ from their checksum"):
        mindio_acp.load(str(root / "x"))


def test_no_code_runs(store: FilesDir, root: Path) -> None:
    """In the table of a file, in its object, and when it is converted."""
    root.mkdir()
    trace, path = root / "trace", root / "x"
    for data in (original.wrapped(b"", pickle.dumps(Evil(trace))), original.of_object({"x": Evil(trace)})):
        path.write_bytes(data)
        with pytest.raises(RuntimeError):
            mindio_acp.load(str(path))
        mindio_acp.convert(str(path), str(root / "y"))
        assert not trace.exists()
    with pytest.raises(RuntimeError, match="can't be loaded"):
        mindio_acp.load(str(root / "y"))
    assert not trace.exists()
    mindio_acp.load(str(path), weights_only=False)
    assert trace.exists(), "which was asked for"


@pytest.mark.parametrize("kind", ["missing", "directory", "link", "same", "file below a file"])
def test_what_can_not_be_converted(kind: str, written: Path) -> None:
    source = to = written
    if kind == "missing":
        source, to = written.with_name("none"), written.with_name("y")
    elif kind == "directory":
        to = written.parent
    elif kind == "link":
        to = written.with_name("y")
        to.symlink_to(written)
    elif kind == "file below a file":
        to = written / "y"
    before = written.read_bytes()
    assert mindio_acp.convert(str(source), str(to)) == -1
    assert written.read_bytes() == before
