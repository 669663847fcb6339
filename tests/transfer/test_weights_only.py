"""Exports of weights alone: a folder in which Hugging Face's ``from_pretrained`` finds all that it needs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import rekindle
from tests.transfer.helpers import Rank, all_of, assert_same, box_of, done, named, names, run, write

W = torch.arange(24.0).view(6, 4)
OPTIMIZER = {"state": {"w": {"exp_avg": {"$tensor": "optimizer.state.w.exp_avg"}}}, "param_groups": []}


@pytest.fixture
def halves(root: Path, memory: Path) -> Path:
    """The root of a checkpoint of two ranks, each with a half of the model and of what its optimizer keeps."""
    ranks = []
    for first in (0, 2):
        pieces = [box_of(name, W, (0, 6), (first, first + 2)) for name in ("model.w", "optimizer.state.w.exp_avg")]
        ranks.append(Rank([*pieces, all_of("model.b", -W)], {**named("model.w", "model.b"), "optimizer": OPTIMIZER}))
    write(root, ranks)
    return root


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """The folder of a model as a download leaves it: links into a cache."""
    cache, folder = tmp_path / "blobs", tmp_path / "trained"
    for directory in (cache, folder):
        directory.mkdir()
    for name in (
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "pytorch_model.bin.index.json",
        "x.safetensors",
    ):
        (cache / name).write_text(f'{{"name": "{name}"}}')
        (folder / name).symlink_to(cache / name)
    (folder / "trainer_state.json").write_text("{}")
    (folder / "onnx").mkdir()
    (folder / "weights.txt").touch()
    os.truncate(folder / "weights.txt", 64_000_001)  # no description is as large
    return folder


def test_the_folder_has_weights_and_what_describes_them(halves: Path, trained: Path, tmp_path: Path) -> None:
    told = done("export", halves, tmp_path / "out", "--weights-only", "--config", trained)
    assert told["format"] == "safetensors" and told["tensors"] == 2
    assert names((tmp_path / "out").iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"name": "config.json"}
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), {"w": W, "b": -W})
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"  # from_pretrained asks for it


def test_large_weights_are_cut_as_hugging_face_cuts_them(halves: Path, trained: Path, tmp_path: Path) -> None:
    done("export", halves, 1, tmp_path / "out", "--weights-only", "--config", trained, "--max-shard-size", 96)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert index == {"metadata": {"total_size": 192}, "weight_map": dict(zip(("w", "b"), files, strict=True))}
    whole = {name: tensor for file in files for name, tensor in load_file(tmp_path / "out" / file).items()}
    assert_same(whole, {"w": W, "b": -W})


def test_a_torch_file_of_the_weights_suits_load_state_dict(halves: Path, tmp_path: Path) -> None:
    done("export", halves, tmp_path / "out.pt", "--weights-only", "--format", "torch")
    assert_same(torch.load(tmp_path / "out.pt", weights_only=True), {"w": W, "b": -W})


def test_the_model_is_found_or_has_to_be_named(root: Path, memory: Path, tmp_path: Path) -> None:
    net = {"net": {"w": {"$tensor": "net.w"}}, "optimizer": OPTIMIZER}
    kept = all_of("optimizer.state.w.exp_avg", W)
    write(root, [Rank([all_of("net.w", W), kept], net)])
    assert done("export", root, tmp_path / "found", "--weights-only")["tensors"] == 1
    assert "from_pretrained needs a config.json" in run("export", root, tmp_path / "bare", "--weights-only").stderr
    write(root, [Rank([all_of("net.w", W), kept], {**net, "ema": {"w": {"$tensor": "net.w"}}})], step=2)
    result = run("export", root, tmp_path / "out", "--weights-only")
    assert result.exit_code == rekindle.UsageError.exit_code and "--only names one of net, ema" in result.stderr
    assert done("export", root, tmp_path / "out", "--weights-only", "--only", "ema")["tensors"] == 1
    write(root, [Rank([kept], {"optimizer": OPTIMIZER})], step=3)
    result = run("export", root, tmp_path / "none", "--weights-only")
    assert result.exit_code == rekindle.NotFoundError.exit_code and "has no model in its state" in result.stderr


def test_what_can_not_be_meant_is_refused(halves: Path, trained: Path, tmp_path: Path) -> None:
    before = sorted(os.listdir(tmp_path))
    (trained / "config.json").unlink()
    for options, told in (
        ([], "Missing option '--format'"),
        (["--weights-only", "--format", "dcp"], "--weights-only is for"),
        (["--format", "safetensors", "--config", trained], "--config is for"),
        (["--weights-only", "--config", trained], "has no config.json"),
        (["--weights-only", "--config", tmp_path / "gone"], "does not exist"),
    ):
        result = run("export", halves, tmp_path / "out", *options)
        assert result.exit_code == 2 and told in result.stderr, (options, result.stderr)
    result = run("export", halves, "best", tmp_path / "out", "--weights-only")
    assert result.exit_code == rekindle.NotFoundError.exit_code and "no checkpoint has a metric" in result.stderr
    assert sorted(os.listdir(tmp_path)) == before
