"""Of a state that is copied later, what may change before is copied at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

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
