"""Files of tensors on a device: copied in the order of the stream, loaded to where they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rekindle

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_state_on_a_device_is_saved_as_it_was(memory: Path, root: Path) -> None:
    """Work on the stream before the save is in it, work after it isn't."""
    base = torch.zeros(64 << 20, device="cuda")
    state = {"views": [base[:10], base[5:20].reshape(3, 5).t()], "whole": base, "half": torch.ones(3).cuda().half()}
    for _ in range(50):
        base += 1
    rekindle.save(state, root / "x.pt")
    base.zero_()
    found = rekindle.load(root / "x.pt")
    rekindle.flush(timeout=120)
    for one in (found, torch.load(root / "x.pt", weights_only=True)):
        assert one["whole"].is_cuda and bool((one["whole"] == 50).all())
        assert one["views"][1].shape == (5, 3) and one["half"].dtype == torch.float16
        assert one["views"][0].untyped_storage().data_ptr() == one["whole"].untyped_storage().data_ptr()
    assert not rekindle.load(root / "x.pt", map_location="cpu")["whole"].is_cuda


def test_each_save_to_one_path_finds_the_newest_values(memory: Path, root: Path) -> None:
    tensor = torch.zeros(8 << 20, device="cuda")
    for number in range(10):
        tensor += 1
        rekindle.save({"x": tensor}, root / "x.pt")
        assert int(rekindle.load(root / "x.pt", map_location="cpu")["x"].min()) == number + 1
