"""A checkpoint that one rank loads for all, in processes of a real group."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import distributed

from rekindle.memory.files_dir import FilesDir
from rekindle.provide import mindio_acp
from tests.provide.ranks import run_ranks


def load_for_all(rank: int, path: str) -> None:
    helper = mindio_acp.CheckpointHelper(rank)
    if rank == 1:
        assert mindio_acp.save({"x": torch.arange(5)}, path) == 1
    distributed.barrier()
    found = helper.load_model_checkpoint(path, 1, distributed.group.WORLD)
    assert torch.equal(found["x"], torch.arange(5))
    assert torch.equal(helper.load_model_checkpoint(path, 0)["x"], torch.arange(5))
    with pytest.raises(RuntimeError, match="rank 1 could not load it"):
        helper.load_model_checkpoint(path + ".none", 1, distributed.group.WORLD)
    distributed.barrier()


def test_one_rank_loads_for_all_and_its_failure_hangs_nobody(
    store: FilesDir, root: Path, tmp_path: Path, memory: Path
) -> None:
    assert run_ranks(load_for_all, tmp_path, [memory] * 2, str(root / "x.pt")) == [0, 0]
