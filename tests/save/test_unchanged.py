"""The quick look at a state sees every change that a whole walk sees: what it says is compared with a fresh one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import rekindle
from rekindle.save.capture import Capture

Linear = torch.nn.Linear


class Job:
    """A model of the usual parts, two optimizers, a schedule and values."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Sequential(Linear(4, 4)))
        self.adam = torch.optim.AdamW(self.model[0].parameters(), lr=0.1)
        self.sgd = torch.optim.SGD(self.model[2].parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.adam, 2)
        self.values = rekindle.Values(epoch=0, history=[1, 2], tensor=torch.zeros(2))
        self.update()

    @property
    def state(self) -> dict[str, Any]:
        return dict(vars(self))

    def update(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.adam.step()
        self.sgd.step()


def same_as_fresh(capture: Capture, job: Job) -> None:
    plan, values = capture.prepare()
    fresh_plan, fresh_values = Capture(job.state, rng=False).prepare()
    assert plan.layout == fresh_plan.layout
    assert plan.static == fresh_plan.static
    assert values == fresh_values
    units = [(u.address, u.start, u.nbytes) for batch in plan.early for u in batch.units]
    assert units == [(u.address, u.start, u.nbytes) for batch in fresh_plan.early for u in batch.units]


CHANGES: dict[str, Callable[[Job], Any]] = {
    "update": Job.update,
    "schedule": lambda job: job.schedule.step(),
    "values": lambda job: setattr(job.values, "epoch", 7),
    "a value grows": lambda job: job.values.history.append(3),
    "a value becomes a tensor": lambda job: setattr(job.values, "epoch", torch.ones(1)),
    "a tensor of a value is another": lambda job: setattr(job.values, "tensor", torch.ones(2)),
    "parameter, another": lambda job: setattr(job.model[0], "weight", torch.nn.Parameter(torch.ones(4, 4))),
    "parameter, other memory": lambda job: setattr(job.model[0].weight, "data", torch.ones(4, 4)),
    "parameter, other shape in the same memory": lambda job: setattr(
        job.model[0].weight, "data", job.model[0].weight.data.view(2, 8)
    ),
    "parameter, turned in place": lambda job: setattr(job.model[0].weight, "data", job.model[0].weight.data.t()),
    "parameter, other dtype in the same memory": lambda job: setattr(
        job.model[1].running_mean, "data", job.model[1].running_mean.data.view(torch.int32)
    ),
    "parameter, gone": lambda job: setattr(job.model[0], "bias", None),
    "parameter, new": lambda job: job.model.register_parameter("extra", torch.nn.Parameter(torch.ones(3))),
    "parameters, other names": lambda job: job.model[0]._parameters.update(
        first=job.model[0]._parameters.pop("weight")
    ),
    "buffer, new": lambda job: job.model.register_buffer("extra", torch.ones(3)),
    "buffer, new and not saved": lambda job: job.model.register_buffer("extra", torch.ones(3), persistent=False),
    "buffer, not saved any more": lambda job: job.model[1]._non_persistent_buffers_set.add("running_mean"),
    "module, another": lambda job: job.model.__setitem__(1, torch.nn.BatchNorm1d(4)),
    "module, new": lambda job: job.model.append(Linear(2, 2)),
    "module, gone": lambda job: job.model.__delitem__(2),
    "module, moved": lambda job: job.model.add_module("3", job.model._modules.pop("1")),
    "module, to another dtype": lambda job: job.model.half(),
    "hook of state_dict": lambda job: job.model[2].register_state_dict_post_hook(
        lambda module, state, prefix, meta: state.__delitem__(prefix + "0.bias")
    ),
    "optimizer, learning rate": lambda job: job.adam.param_groups[0].update(lr=0.5),
    "optimizer, learning rate a tensor": lambda job: job.adam.param_groups[0].update(lr=torch.tensor(0.5)),
    "optimizer, a new setting": lambda job: job.adam.param_groups[0].update(note="x"),
    "optimizer, betas": lambda job: job.adam.param_groups[0].update(betas=(0.1, 0.2, 0.3)),
    "optimizer, new group": lambda job: job.adam.add_param_group({"params": [torch.nn.Parameter(torch.ones(5))]}),
    "optimizer, state gone": lambda job: job.adam.state.clear(),
    "optimizer, state of one gone": lambda job: job.adam.state.pop(job.model[0].bias),
    "optimizer, state another": lambda job: job.adam.state[job.model[0].bias].update(exp_avg=torch.ones(4)),
    "optimizer, state has more": lambda job: job.adam.state[job.model[0].bias].update(more=torch.ones(4)),
    "optimizer, state has a number": lambda job: job.adam.state[job.model[0].bias].update(more=4),
    "optimizer, state in another order": lambda job: job.sgd.state.update(
        {job.model[2][0].weight: job.sgd.state.pop(job.model[2][0].weight)}
    ),
    "optimizer, a parameter twice": lambda job: job.sgd.param_groups[0]["params"].append(job.model[2][0].bias),
    "optimizer, loaded": lambda job: job.adam.load_state_dict(job.adam.state_dict()),
    "optimizer, hook of state_dict": lambda job: job.adam.register_state_dict_post_hook(
        lambda optimizer, state: {**state, "more": 1}
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_change_goes_unseen(change: str) -> None:
    job = Job()
    capture = Capture(job.state, rng=False)
    for _ in range(2):
        same_as_fresh(capture, job)
    CHANGES[change](job)
    for _ in range(2):
        same_as_fresh(capture, job)


def test_an_update_makes_no_new_plan() -> None:
    job = Job()
    capture = Capture(job.state, rng=False)
    plans = []
    for _ in range(3):
        plans.append(capture.prepare()[0])
        job.update()
        job.schedule.step()
        job.values.epoch += 1
    assert plans[0] is plans[1] is plans[2]


def test_modules_with_a_state_dict_of_their_own() -> None:
    class Extra(Linear):
        def get_extra_state(self) -> Any:
            return {"calls": self.calls}

    class Renamed(Linear):
        def state_dict(self, **options: Any) -> Any:
            return {f"x.{name}": value for name, value in super().state_dict(**options).items()}

    job = Job()
    job.extra, job.renamed = Extra(2, 2), Renamed(2, 2)
    for calls in range(3):
        job.extra.calls = calls
        if not calls:
            capture = Capture(job.state, rng=False)
        same_as_fresh(capture, job)
