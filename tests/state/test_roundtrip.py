"""Every kind of training state, saved and loaded into a fresh twin: equal bit for bit, and it goes on equally."""

from __future__ import annotations

import collections
import random

import numpy
import pytest
import torch
from torch.optim import lr_scheduler

import rekindle
from rekindle.format.layout import DTYPES
from tests.save.test_capture import assert_same_state, model_and_optimizer, update


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_bit_for_bit_in_a_module_and_elsewhere(pipeline, name):
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    torch.manual_seed(0)

    def bits(count: int) -> torch.Tensor:
        high = 2 if name == "bool" else 256
        return torch.randint(0, high, (count * DTYPES[name][1],), dtype=torch.uint8)

    def module(raw: torch.Tensor) -> torch.nn.Module:
        made = torch.nn.Module()
        made.register_buffer("x", raw.view(dtype).view(4, 6))
        made.register_buffer("turned", raw.view(dtype).view(6, 4).t())
        made.register_buffer("scalar", raw.view(dtype)[0])
        return made

    raw = bits(24)
    live = {"m": module(raw), "v": rekindle.Values(x=raw.view(dtype), y=[raw.view(dtype)[5:9]])}
    line = pipeline(live)
    receipt = line.save()
    assert {chunk.dtype for chunk in receipt.layout.chunks} == {name}
    twin = {"m": module(bits(24)), "v": rekindle.Values()}
    line.load_into(twin)
    assert twin["v"].x.dtype == dtype
    assert torch.equal(twin["v"].x.view(torch.uint8), raw)
    assert torch.equal(twin["v"].y[0].view(torch.uint8), raw.view(dtype)[5:9].contiguous().view(torch.uint8))
    for key in ("x", "turned"):
        a, b = (getattr(m, key).contiguous().view(-1).view(torch.uint8) for m in (live["m"], twin["m"]))
        assert torch.equal(a, b)
    assert twin["m"].scalar.shape == ()


# -- optimizers ------------------------------------------------------------------------------------------------------

OPTIMIZERS = [
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"capturable": False, "maximize": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (torch.optim.Adafactor, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=["-".join([k.__name__, *o]) for k, o in OPTIMIZERS])
def test_training_goes_on_as_if_nothing_had_happened(pipeline, kind, options):
    model, optimizer = model_and_optimizer(0, kind, **options)
    for seed in range(3):
        update(model, optimizer, seed)
    line = pipeline({"model": model, "optimizer": optimizer})
    line.save()
    twin, its_optimizer = model_and_optimizer(1, kind, **options)
    line.load_into({"model": twin, "optimizer": its_optimizer})
    assert_same_state(model, twin)
    assert_same_state(optimizer, its_optimizer)
    for seed in range(3, 6):
        update(model, optimizer, seed)
        update(twin, its_optimizer, seed)
    assert_same_state(model, twin)
    assert_same_state(optimizer, its_optimizer)


def test_lbfgs_with_its_lists_of_tensors(pipeline):
    def run(model, optimizer, seed):
        torch.manual_seed(seed)
        data = torch.randn(8, 4)

        def closure():
            optimizer.zero_grad()
            loss = model(data).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    (model, optimizer), (twin, its_optimizer) = (model_and_optimizer(s, torch.optim.LBFGS) for s in (0, 1))
    run(model, optimizer, 0)
    line = pipeline({"model": model, "optimizer": optimizer})
    line.save()
    line.load_into({"model": twin, "optimizer": its_optimizer})
    run(model, optimizer, 1)
    run(twin, its_optimizer, 1)
    assert_same_state(model, twin)


def bfloat16_with_float32_state(seed: int):
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 3, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn(parameter.shape),
            "exp_avg_sq": torch.rand(parameter.shape),
            "residuals": [torch.randn(parameter.shape)],
        }
    return model, optimizer


def test_float32_state_of_bfloat16_parameters_is_not_cast(pipeline):
    (model, optimizer), (twin, its_optimizer) = (bfloat16_with_float32_state(seed) for seed in (0, 1))
    line = pipeline({"model": model, "optimizer": optimizer})
    line.save()
    line.load_into({"model": twin, "optimizer": its_optimizer})
    for saved, loaded in zip(model.parameters(), twin.parameters(), strict=True):
        assert loaded.dtype == torch.bfloat16
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert its_optimizer.state[loaded][key].dtype == torch.float32, key
            assert torch.equal(its_optimizer.state[loaded][key], optimizer.state[saved][key]), key


def test_float32_state_of_bfloat16_parameters_is_not_cast_within_lists_either(pipeline):
    (model, optimizer), (twin, its_optimizer) = (bfloat16_with_float32_state(seed) for seed in (0, 1))
    line = pipeline({"model": model, "optimizer": optimizer})
    line.save()
    line.load_into({"model": twin, "optimizer": its_optimizer})
    for saved, loaded in zip(model.parameters(), twin.parameters(), strict=True):
        (before,), (after,) = optimizer.state[saved]["residuals"], its_optimizer.state[loaded]["residuals"]
        assert after.dtype == torch.float32 and torch.equal(after, before)


def test_loading_an_optimizer_shares_no_memory_with_the_shard(pipeline):
    model, optimizer = model_and_optimizer()
    update(model, optimizer)
    line = pipeline({"model": model, "optimizer": optimizer})
    line.save()
    twin, its_optimizer = model_and_optimizer(1)
    line.load_into({"model": twin, "optimizer": its_optimizer})
    line.slots[0][:] = bytes(len(line.slots[0]))  # the slot is recycled
    assert_same_state(model, twin)
    assert_same_state(optimizer, its_optimizer)


def test_parameters_stay_the_objects_that_they_were(pipeline):
    model, optimizer = model_and_optimizer()
    update(model, optimizer)
    line = pipeline({"model": model, "optimizer": optimizer})
    line.save()
    parameters = [(id(p), p.data_ptr(), p.requires_grad) for p in model.parameters()]
    line.load_into({"model": model, "optimizer": optimizer})
    assert [(id(p), p.data_ptr(), p.requires_grad) for p in model.parameters()] == parameters
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [place[0] for place in parameters]


# -- schedulers and scalers ------------------------------------------------------------------------------------------


class Warmup:
    """A schedule with a state of its own."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / self.steps)


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "LambdaLR-object": lambda o: lr_scheduler.LambdaLR(o, Warmup(5)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 4, 7]),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, step_size_up=3, cycle_momentum=False),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 10),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedules_go_on(pipeline, make):
    def advance(optimizer, scheduler, steps):
        rates = []
        for step in steps:
            optimizer.step()
            scheduler.step(*[1.0] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
            rates.append((step, [group["lr"] for group in optimizer.param_groups]))
        return rates

    (_, optimizer), (_, its_optimizer) = (model_and_optimizer(0, torch.optim.SGD) for _ in range(2))
    scheduler, its_scheduler = make(optimizer), make(its_optimizer)
    advance(optimizer, scheduler, range(4))
    line = pipeline({"optimizer": optimizer, "scheduler": scheduler})
    line.save()
    line.load_into({"optimizer": its_optimizer, "scheduler": its_scheduler})
    assert_same_state(scheduler, its_scheduler)
    assert advance(optimizer, scheduler, range(4, 12)) == advance(its_optimizer, its_scheduler, range(4, 12))


def test_a_multi_step_schedule_keeps_its_counter(pipeline):
    _, optimizer = model_and_optimizer()
    scheduler = lr_scheduler.MultiStepLR(optimizer, [5, 5, 9])
    line = pipeline({"scheduler": scheduler})
    line.save()
    scheduler.milestones = None
    line.load_into({"scheduler": scheduler})
    assert (
        scheduler.milestones == collections.Counter({5: 2, 9: 1}) and type(scheduler.milestones) is collections.Counter
    )


def test_a_gradient_scaler(pipeline):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    model, optimizer = model_and_optimizer(0, torch.optim.SGD)
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    line = pipeline({"scaler": scaler})
    line.save()
    twin = torch.amp.GradScaler("cpu")
    line.load_into({"scaler": twin})
    assert twin.state_dict() == scaler.state_dict() and twin.get_scale() == scaler.get_scale() != 1024.0


# -- random generators -----------------------------------------------------------------------------------------------


def draw() -> list:
    return [
        *[random.random(), random.gauss(0, 1), random.getrandbits(70)],
        *[numpy.random.rand(), numpy.random.standard_normal(), int(numpy.random.randint(1 << 30))],
        *[torch.rand(3).tolist(), torch.randn(17).tolist(), torch.nn.functional.dropout(torch.ones(50)).tolist()],
    ]


def test_random_generators_go_on_bit_for_bit(pipeline):
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    random.gauss(0, 1)  # half of a pair is kept for the next call, in Python's and in NumPy's generator
    numpy.random.standard_normal()
    line = pipeline({}, rng=True)
    line.save()
    expected = draw()
    draw()
    line.load_into({}, rng=True)
    assert draw() == expected


def test_random_generators_are_put_back_after_everything_else_was_loaded(pipeline):
    class Restless:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            draw()

    line = pipeline({"a": Restless(), "z": Restless()}, rng=True)
    line.save()
    expected = draw()
    line.load_into({"a": Restless(), "z": Restless()}, rng=True)
    assert draw() == expected


def test_a_checkpoint_without_generators_leaves_them_alone(pipeline):
    line = pipeline({"v": rekindle.Values(a=1)})
    line.save()
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    line.load_into({"v": rekindle.Values()}, rng=True)
    assert torch.equal(torch.rand(3), expected)


def test_a_checkpoint_with_generators_loads_into_a_state_without(pipeline):
    line = pipeline({"v": rekindle.Values(a=1)}, rng=True)
    line.save()
    back = rekindle.Values()
    line.load_into({"v": back})
    assert back.a == 1


# -- states of one's own ---------------------------------------------------------------------------------------------


def test_a_stateful_object_with_nested_tensors(pipeline):
    class Average:
        def __init__(self, seed):
            generator = torch.Generator().manual_seed(seed)
            self.shadow = {
                "layers": [{"w": torch.randn(3, generator=generator)}, (torch.randn(2, generator=generator), seed)]
            }
            self.order = collections.OrderedDict([("b", torch.tensor(1)), ("a", {3: torch.tensor(2), None: seed})])

        def state_dict(self):
            return {"shadow": self.shadow, "order": self.order, "empty": [{}, [], (), None]}

        def load_state_dict(self, state):
            assert state["empty"] == [{}, [], (), None]
            self.shadow, self.order = state["shadow"], state["order"]

    live, twin = Average(1), Average(2)
    line = pipeline({"average": live})
    line.save()
    line.load_into({"average": twin})
    assert repr(twin.state_dict()) == repr(live.state_dict())
    assert type(twin.order) is collections.OrderedDict and list(twin.order) == ["b", "a"]
    twin.shadow["layers"][0]["w"].add_(1)
    assert not torch.equal(twin.shadow["layers"][0]["w"], live.shadow["layers"][0]["w"])


def test_a_module_with_extra_state(pipeline):
    class Extra(torch.nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.extra = {"calls": 0, "seen": torch.zeros(2)}

        def get_extra_state(self):
            return self.extra

        def set_extra_state(self, state):
            self.extra = state

    live, twin = Extra(), Extra()
    live.extra = {"calls": 7, "seen": torch.ones(2)}
    line = pipeline({"model": live})
    line.save()
    line.load_into({"model": twin})
    line.slots[0][:] = bytes(len(line.slots[0]))
    assert twin.extra["calls"] == 7 and twin.extra["seen"].tolist() == [1, 1]


def test_buffers_are_saved_and_those_that_are_not_persistent_are_not(pipeline):
    def make():
        module = torch.nn.BatchNorm1d(3)
        module.register_buffer("scratch", torch.zeros(1), persistent=False)
        return module

    live, twin = make(), make()
    live(torch.randn(8, 3))
    live.scratch.fill_(5)
    line = pipeline({"model": live})
    line.save()
    line.load_into({"model": twin})
    assert torch.equal(live.running_mean, twin.running_mean) and twin.num_batches_tracked.item() == 1
    assert twin.scratch.item() == 0


def test_a_parameter_that_is_not_contiguous_keeps_its_strides(pipeline):
    def make(seed):
        torch.manual_seed(seed)
        return torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)

    live, twin = make(0), make(1)
    line = pipeline({"model": live})
    line.save()
    line.load_into({"model": twin})
    assert torch.equal(live.weight, twin.weight)
    assert twin.weight.is_contiguous(memory_format=torch.channels_last)


def test_plain_values(pipeline):
    line = pipeline({"v": rekindle.Values(epoch=3, best=float("inf"), seen={1, 2}, name="x", nothing=None)})
    line.save()
    back = rekindle.Values(epoch=0, surplus=1)
    line.load_into({"v": back})
    assert back.state_dict() == {"epoch": 3, "best": float("inf"), "seen": {1, 2}, "name": "x", "nothing": None}
    with pytest.raises(AttributeError, match="surplus"):
        _ = back.surplus
