"""A tensor is called what the bare model calls it, however that is wrapped."""

from __future__ import annotations

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import rekindle
from rekindle.save.capture import Capture


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))


def wrapped(how: str) -> torch.nn.Module:
    model = net()
    if how == "compiled":
        return torch.compile(model)
    if how == "a part compiled":
        model[0] = torch.compile(model[0])
    if how == "a part recomputed":
        model[2] = checkpoint_wrapper(model[2])
    return model


def names(model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> set[str]:
    state = {"model": model} | {f"optimizer{n or ''}": optimizer for n, optimizer in enumerate(optimizers)}
    plan, _ = Capture(state, rng=False).prepare()
    return {chunk.name for chunk in plan.layout.chunks}


def test_wrappings_leave_no_trace_and_names_are_those_of_torch() -> None:
    expected = None
    for how in ("plain", "compiled", "a part compiled", "a part recomputed"):
        model = wrapped(how)
        optimizer = torch.optim.AdamW(model.parameters())
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        found = names(model, optimizer)
        theirs = {f"model.{key}" for key in get_model_state_dict(model)}
        for key, kept in get_optimizer_state_dict(model, optimizer)["state"].items():
            theirs |= {f"optimizer.state.{key}.{name}" for name in kept}
        assert found == theirs, how
        expected = expected or found
        assert found == expected, how


def test_a_checkpoint_of_one_wrapping_loads_into_another(pipeline) -> None:
    model = wrapped("a part compiled")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    line = pipeline({"model": model, "optimizer": optimizer})
    line.save()
    other = wrapped("a part recomputed")
    others = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.9)
    line.load_into({"model": other, "optimizer": others})
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(optimizer.state[ours]["momentum_buffer"], others.state[theirs]["momentum_buffer"])
    assert others.param_groups[0]["lr"] == 0.1


def test_an_optimizer_of_two_modules_names_the_module_too(pipeline) -> None:
    one, two = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1, momentum=0.9)
    for p in [*one.parameters(), *two.parameters()]:
        p.grad = torch.randn_like(p)
    optimizer.step()
    plan, _ = Capture({"one": one, "two": two, "optimizer": optimizer}, rng=False).prepare()
    kept = {chunk.name for chunk in plan.layout.chunks if chunk.name.startswith("optimizer.")}
    assert {"optimizer.state.one.weight.momentum_buffer", "optimizer.state.two.weight.momentum_buffer"} <= kept


def test_parameters_of_no_module_are_numbered() -> None:
    loose = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([loose], lr=0.1, momentum=0.9)
    loose.grad = torch.ones(3)
    optimizer.step()
    plan, _ = Capture({"optimizer": optimizer, "values": rekindle.Values(a=1)}, rng=False).prepare()
    assert {chunk.name for chunk in plan.layout.chunks} == {"optimizer.state.0.momentum_buffer"}
