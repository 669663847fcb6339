"""Of a state that is copied later, what may change before is copied at once."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rekindle.common.timeouts import in_background
from rekindle.files.contents import Contents
from rekindle.files.pickled import of_object
from rekindle.integrations.deepspeed.stable import freeze, stable_storages


def engine_of(*, stage_3: bool = False) -> Any:
    """An engine whose optimizer wraps one of torch, as ZeRO's does."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    inner = torch.optim.AdamW(module.parameters())
    module(torch.randn(3, 4)).sum().backward()
    inner.step()
    flat = [torch.arange(12.0)]
    optimizer = SimpleNamespace(optimizer=inner, single_partition_of_fp32_groups=flat)
    return SimpleNamespace(module=module, optimizer=optimizer, zero_optimization_partition_weights=lambda: stage_3)


def data(contents: Contents) -> bytes:
    return b"".join(contents.chunks())


def test_weights_and_the_optimizers_state_stay_where_they_are_and_the_rest_is_copied() -> None:
    engine, users = engine_of(), torch.zeros(5)
    inner = engine.optimizer.optimizer
    flat = engine.optimizer.single_partition_of_fp32_groups
    state = {"module": engine.module.state_dict(), "optimizer": inner.state_dict(), "flat": flat, "users": users}
    contents = of_object(state)
    before = data(contents)
    freeze(contents, stable_storages(engine))
    engine.module(torch.randn(3, 4))  # batch norm counts
    users.fill_(7)
    assert data(contents) == before
    addresses = {segment.address for segment in contents.segments}
    stay = [*engine.module.parameters(), *flat, *(part for s in inner.state.values() for part in s.values())]
    assert {tensor.data_ptr() for tensor in stay} <= addresses


def test_weights_that_zero_3_gathers_and_lets_go_of_are_copied() -> None:
    engine = engine_of(stage_3=True)
    contents = of_object(engine.module.state_dict())
    before = data(contents)
    freeze(contents, stable_storages(engine))
    with torch.no_grad():
        for weight in engine.module.parameters():
            weight.zero_()
    assert data(contents) == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_another_thread_copies_after_the_work_of_the_stream_of_the_save() -> None:
    weights = torch.zeros(64 << 20, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(50):
            weights += 1
        contents = of_object({"x": weights})
        freeze(contents, {weights.untyped_storage().data_ptr()})
    copied = in_background(lambda: data(contents), "copy").result()
    assert bool((torch.load(io.BytesIO(copied), map_location="cpu")["x"] == 50).all())
