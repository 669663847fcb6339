"""A checkpoint that one rank loads for all, in processes of a real group."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rekindle.memory.files_dir import FilesDir

_RANK = """
import sys
import torch
from torch import distributed
from rekindle.provide import mindio_acp

rank, store, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
helper = mindio_acp.CheckpointHelper(rank)
if rank == 1:
    assert mindio_acp.save({"x": torch.arange(5)}, path) == 1
distributed.barrier()
found = helper.load_model_checkpoint(path, 1, distributed.group.WORLD)
assert torch.equal(found["x"], torch.arange(5))
assert torch.equal(helper.load_model_checkpoint(path, 0)["x"], torch.arange(5))
try:
    helper.load_model_checkpoint(path + ".none", 1, distributed.group.WORLD)
except RuntimeError as error:
    assert "rank 1 could not load it" in str(error)
else:
    raise AssertionError("a file that isn't there was loaded")
distributed.barrier()
"""


def test_one_rank_loads_for_all_and_its_failure_hangs_nobody(store: FilesDir, root: Path, tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), str(tmp_path / "group"), str(root / "x.pt")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert [(rank.communicate(timeout=120)[1], rank.returncode)[1] for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
