"""What earlier versions have left on storage and in memory restores, tensor by tensor and value by value."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.format.names import canonical_root, job_name
from rekindle.memory.job_dir import memory_base
from rekindle.storage.open import open_store
from tests.held.make import DURABLE, IN_MEMORY, WORLD, state_of
from tests.parallel.launch import on_ranks

HELD = sorted(Path(__file__).parent.glob("*.tar.gz"))


def unpack(held: Path, place: Path, memory: Path) -> Path:
    """The held job, moved to another root. Gives that root."""
    root = place / "run"
    with tarfile.open(held) as file:
        file.extractall(place, filter="data")
    (directory,) = place.glob("memory/rekindle-*/*")
    job = memory_base(memory) / job_name(canonical_root(root))
    job.parent.mkdir(mode=0o700, parents=True)
    shutil.move(directory, job)
    for private in (job, *filter(Path.is_dir, job.iterdir())):
        private.chmod(0o700)  # which extraction has forgotten
    said = json.loads((job / "job.json").read_text())
    (job / "job.json").write_text(json.dumps({**said, "root": str(root)}))
    return root


def restore(rank: int, world: int, root: str, memory: str, parent: str) -> dict[str, Any]:
    state = state_of(1, rank)
    ckpt = rekindle.Checkpointer(root, state, memory=memory, rng=False)
    step = ckpt.restore()
    assert ckpt.metrics.restored_from.startswith(parent), ckpt.metrics.restored_from
    expected = state_of(step, rank)
    for name in ("model", "optimizer"):
        same(state[name].state_dict(), expected[name].state_dict(), name)
    for name, value in expected["values"].items():
        same(state["values"][name], value, name)
    assert state["model"].conv.weight.is_contiguous(memory_format=torch.channels_last)
    return {"step": step}


def same(found: Any, expected: Any, path: str) -> None:
    assert type(found) is type(expected), path
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected), path
    elif isinstance(expected, dict):
        assert list(found) == list(expected), path
        for key, value in expected.items():
            same(found[key], value, f"{path}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), path
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            same(one, other, f"{path}[{number}]")
    else:
        assert found == expected, path


@pytest.mark.parametrize("held", HELD, ids=lambda path: path.name)
def test_memory_of_an_earlier_version_is_restored(held, tmp_path, memory):
    root = unpack(held, tmp_path, memory)
    answers = on_ranks(WORLD, restore, str(root), str(memory), "memory")
    assert [answer["step"] for answer in answers] == [IN_MEMORY] * WORLD


@pytest.mark.parametrize("held", HELD, ids=lambda path: path.name)
def test_a_checkpoint_of_an_earlier_version_is_restored(held, tmp_path, memory):
    root = unpack(held, tmp_path, memory / "elsewhere")
    answers = on_ranks(WORLD, restore, str(root), str(memory), "storage")
    assert [answer["step"] for answer in answers] == [DURABLE] * WORLD
    (kept,) = open_store(root).published()
    assert (kept.stamp.step, kept.pinned) == (DURABLE, True)
