"""Tensors of which only this rank has a copy that outlives a fault."""

from __future__ import annotations

import torch

from rekindle.format.lineage import Incarnation, ShardId
from rekindle.save.capture import Capture
from rekindle.save.fence import Fence
from rekindle.save.live import Live


def test_averaged_weights_have_no_replica_though_they_are_alike_everywhere() -> None:
    model = torch.nn.Linear(600, 600)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    capture = Capture({"model": model, "average": averaged, "optimizer": optimizer})
    fence = Fence(capture.state)
    capture.use_fence(fence)
    live = Live(capture, None, fence)
    live.begin_guard()
    live.take(ShardId(1, 0, 2, Incarnation.begin(1)))
    # The average's bias and counter are small: their copies are in memory at each step.
    assert sorted(live.alone) == ["average.module.weight", "model.bias", "model.weight"]
    live.close()
