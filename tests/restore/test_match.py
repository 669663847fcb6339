"""A sound checkpoint that does not fit: the tensor is named, and the live state stays as it is."""

from __future__ import annotations

import copy

import pytest
import torch

import rekindle
from rekindle.errors import StateMismatchError


def net(inputs: int = 4, outputs: int = 3, **options) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(inputs, 5, **options), torch.nn.Linear(5, outputs, **options))


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    sum(p.float().sum() for p in model.parameters()).backward()
    optimizer.step()
    return optimizer


def refused(pipeline, saved, live, *parts: str) -> None:
    """Loading raises an error that has all of ``parts``, and changes nothing."""
    line = pipeline(saved)
    line.save()
    before = {name: copy.deepcopy(entry.state_dict()) for name, entry in live.items()}
    with pytest.raises(StateMismatchError) as caught:
        line.load_into(live)
    for part in parts:
        assert part in str(caught.value)
    for name, entry in live.items():
        assert repr(entry.state_dict()) == repr(before[name]), f"{name} was changed"


def test_a_tensor_that_only_the_live_state_has(pipeline):
    live = net()
    live.register_buffer("surplus", torch.ones(2))
    refused(
        pipeline,
        {"v": rekindle.Values(a=1), "model": net()},
        {"v": rekindle.Values(a=2), "model": live},
        "model.surplus",
    )


def test_a_tensor_that_only_the_checkpoint_has(pipeline):
    refused(pipeline, {"model": net()}, {"model": torch.nn.Sequential(net()[0])}, "model.1.weight", "checkpoint")


def test_a_tensor_of_another_shape(pipeline):
    refused(pipeline, {"model": net(outputs=3)}, {"model": net(outputs=7)}, "model.1.weight", "[7, 5]", "[3, 5]")


def test_a_tensor_of_another_dtype(pipeline):
    live = {"model": net(dtype=torch.bfloat16)}
    refused(pipeline, {"model": net()}, live, "model.0.weight", "bfloat16", "float32")


def test_a_shape_that_torch_would_broadcast(pipeline):
    saved, live = torch.nn.Module(), torch.nn.Module()
    saved.register_buffer("x", torch.ones(1))
    live.register_buffer("x", torch.zeros(()))
    refused(pipeline, {"model": saved}, {"model": live}, "model.x")


def test_entries_of_other_names(pipeline):
    refused(pipeline, {"model": net(), "ema": net()}, {"model": net(), "teacher": net()}, "'ema'", "'teacher'")


def test_many_problems_are_counted(pipeline):
    saved, live = torch.nn.Module(), torch.nn.Module()
    for number in range(20):
        live.register_buffer(f"x{number:02}", torch.ones(1))
    refused(pipeline, {"model": saved}, {"model": live}, "model.x00", "15 more")


def two_groups(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": lr}])


def test_groups_of_different_options_that_are_one_now(pipeline):
    model, other = net(), net()
    saved = {"model": model, "optimizer": two_groups(model, 0.5)}
    refused(pipeline, saved, {"model": other, "optimizer": adam(other)}, "optimizer", "group 0", "different options")


def test_groups_of_the_same_options_that_are_one_now(pipeline):
    model, other = net(), net()
    line = pipeline({"model": model, "optimizer": two_groups(model, 1e-3)})
    line.save()
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.1)
    line.load_into({"model": other, "optimizer": optimizer})
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3]


def test_parameters_that_an_optimizer_has_no_more(pipeline):
    model, other = net(), net()
    partial = torch.optim.AdamW(other[0].parameters())
    saved = {"model": model, "optimizer": adam(model)}
    refused(pipeline, saved, {"model": other, "optimizer": partial}, "optimizer", "'1.bias'", "only in the checkpoint")


def test_parameters_that_an_optimizer_did_not_have(pipeline):
    model, other = net(), net()
    saved = {"model": model, "optimizer": torch.optim.AdamW(model[0].parameters())}
    refused(
        pipeline, saved, {"model": other, "optimizer": adam(other)}, "optimizer", "'1.bias'", "only in the live state"
    )


def test_a_module_where_plain_values_were(pipeline):
    refused(pipeline, {"x": rekindle.Values(a=1)}, {"x": net()}, "x.0.weight")


def test_an_optimizer_where_plain_values_were(pipeline):
    model = net()
    refused(
        pipeline,
        {"model": net(), "x": rekindle.Values(a=1)},
        {"model": model, "x": torch.optim.SGD(model.parameters(), lr=1)},
        "x",
    )


def test_a_stateful_object_that_refuses_is_named(pipeline):
    class Picky:
        def state_dict(self):
            return {"a": 1}

        def load_state_dict(self, state):
            raise KeyError("b")

    line = pipeline({"picky": Picky()})
    line.save()
    with pytest.raises(StateMismatchError, match=r"picky.*'b'"):
        line.load_into({"picky": Picky()})


def test_a_mismatch_can_be_caught_as_the_built_in(pipeline):
    line = pipeline({"model": net()})
    line.save()
    with pytest.raises(ValueError):
        line.load_into({"model": net(inputs=2)})
