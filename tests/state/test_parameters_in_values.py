"""Tensors outside of modules come back as what they were to autograd."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

import rekindle


def kind(tensor: torch.Tensor) -> tuple[type, bool, bool]:
    return type(tensor), tensor.requires_grad, tensor.is_leaf


def test_parameters_and_what_requires_gradients_among_values(pipeline):
    p = Parameter(torch.randn(3))
    tensors = {
        "parameter": p,
        "again": p,
        "its data": p.data,
        "frozen": Parameter(torch.randn(2), requires_grad=False),
        "leaf": torch.randn(2, requires_grad=True),
        "numbers": Parameter(torch.arange(3), requires_grad=False),
        "plain": torch.randn(2),
        "nothing": Parameter(torch.empty(0)),
        "turned": Parameter(torch.randn(2, 3).t()),
        "nested": [(Parameter(torch.randn(1)),)],
    }
    live, back = rekindle.Values(**tensors), rekindle.Values()
    line = pipeline({"v": live})
    line.save()
    line.load_into({"v": back})
    found = back.state_dict()
    found["nested"], tensors["nested"] = found["nested"][0][0], tensors["nested"][0][0]
    for name, tensor in tensors.items():
        assert kind(found[name]) == kind(tensor), name
        assert torch.equal(found[name], tensor) and found[name].stride() == tensor.stride(), name
    assert found["again"] is found["parameter"]
    (found["parameter"].sum() * found["leaf"].sum()).backward()
    assert found["parameter"].grad is not None and found["leaf"].grad is not None


def test_what_was_computed_comes_back_as_a_leaf_as_from_torch_load(pipeline):
    live, back = rekindle.Values(x=torch.randn(2, requires_grad=True) * 2), rekindle.Values()
    line = pipeline({"v": live})
    line.save()
    line.load_into({"v": back})
    assert kind(back.x) == (torch.Tensor, True, True) and torch.equal(back.x, live.x)


def test_values_that_lie_in_a_module_are_stored_once_and_keep_their_kind(pipeline):
    def state():
        model = torch.nn.Linear(3, 2)
        return {"model": model, "v": rekindle.Values(weight=model.weight), "w": rekindle.Values(bias=model.bias.data)}

    live, twin = state(), state()
    line = pipeline(live)
    assert len(line.save().layout.chunks) == 2
    line.load_into(twin)
    assert kind(twin["v"].weight) == (Parameter, True, True) and torch.equal(twin["v"].weight, live["model"].weight)
    assert kind(twin["w"].bias) == (torch.Tensor, False, True)
    assert kind(twin["model"].weight) == (Parameter, True, True)


@pytest.mark.parametrize("now", [True, False])
def test_a_tensor_whose_gradients_are_wanted_since_the_last_save(pipeline, now):
    live, back = rekindle.Values(x=torch.randn(2, requires_grad=not now)), rekindle.Values()
    line = pipeline({"v": live})
    line.save()
    live.x.requires_grad_(now)
    line.save()
    line.load_into({"v": back})
    assert back.x.requires_grad is now


def test_gradients_of_what_has_none_are_refused(pipeline):
    receipt = pipeline({"v": rekindle.Values(x=torch.arange(3))}).save()
    raw = receipt.raw.replace(b'"dtype":"int64"', b'"requires_grad":true,"dtype":"int64"')
    static = raw[raw.index(b'"checksum":') : -1]
    with pytest.raises(rekindle.FormatError, match=r"v\.x"):
        type(receipt).decode(type(receipt).encode(receipt.stamp, static, receipt.checksums, b"[]"), "memory")
