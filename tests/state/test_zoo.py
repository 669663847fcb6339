"""One of each: what torch.save and load_state_dict() bring back, a checkpoint brings back, or it is refused by path."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao import quantization
from torch.optim import lr_scheduler
from torch.testing._internal.two_tensor import TwoTensor

import rekindle
from rekindle.errors import UnsupportedValueError
from tests.save.test_capture import flat

pytestmark = pytest.mark.filterwarnings("ignore")
State = dict[str, Any]


def plain_step(state: State) -> None:
    """An update of everything that the state has."""
    model, optimizer = state["model"], state.get("optimizer")

    def closure() -> torch.Tensor:
        if optimizer is not None:
            optimizer.zero_grad()
        result = model(torch.randn(5, 4))
        loss = result.square().mean() if isinstance(result, torch.Tensor) else result[0].square().mean()
        if loss.requires_grad:
            loss.backward()
        return loss

    if optimizer is None:
        closure()
    elif isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()
    if "scheduler" in state:
        state["scheduler"].step(*[1.0] * isinstance(state["scheduler"], lr_scheduler.ReduceLROnPlateau))


def run(state: State, seeds: range, step: Callable[[State], None]) -> State:
    for seed in seeds:
        torch.manual_seed(seed)
        step(state)
    return state


def compare(pipeline, make: Callable[[], State], step: Callable[[State], None] = plain_step) -> None:
    def fresh(seed: int) -> State:
        torch.manual_seed(seed)
        return make()

    live = run(fresh(0), range(3), step)
    file = io.BytesIO()
    torch.save({name: entry.state_dict() for name, entry in live.items()}, file)
    file.seek(0)
    ours, theirs = fresh(1), fresh(1)
    for name, saved in torch.load(file, weights_only=False).items():
        theirs[name].load_state_dict(saved)
    line = pipeline(live)
    line.save()
    line.load_into(ours)
    for seeds in (range(0), range(3, 6)):
        left, right = (
            flat({name: entry.state_dict() for name, entry in run(state, seeds, step).items()})
            for state in (ours, theirs)
        )
        assert left.keys() == right.keys()
        for path, value in left.items():
            assert same(value, right[path]), (seeds, path)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and type(a) is type(b)
        return alike and bits(a) == bits(b)
    return type(a) is type(b) and (a == b or a != a)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


# -- optimizers ------------------------------------------------------------------------------------------------------

TRIED: list[dict[str, Any]] = [{}, {"foreach": True}, {"fused": True}, {"maximize": True}]
MORE = {
    "SGD": [{"momentum": 0.9}, {"momentum": 0.9, "fused": True}, {"momentum": 0.9, "dampening": 0.1}],
    "Adam": [{"amsgrad": True}, {"amsgrad": True, "fused": True}, {"lr": torch.tensor(0.1)}],
    "AdamW": [{"amsgrad": True}, {"lr": torch.tensor(0.1), "fused": True}],
    "RMSprop": [{"centered": True, "momentum": 0.9}],
    "NAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "LBFGS": [{"line_search_fn": "strong_wolfe"}],
}
UPDATES = (torch.optim.Optimizer, torch.optim.SparseAdam)  # the base, and what only takes sparse gradients
KINDS = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type) and kind not in UPDATES}


def optimizer_cases() -> dict[str, tuple[type, dict[str, Any]]]:
    """All that takes effect on a CPU: what a kind has no such option for is left out."""
    found = {}
    for name, kind in KINDS.items():
        for options in [*TRIED, *MORE.get(name, [])]:
            try:
                kind([nn.Parameter(torch.ones(2, 2))], **options)
            except (TypeError, RuntimeError, ValueError):
                assert options, name
            else:
                found["-".join([name, *options])] = kind, options
    return found


OPTIMIZERS = optimizer_cases()


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers(pipeline, kind, options):
    def make() -> State:
        model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Tanh(), nn.Linear(3, 2, bias=False))
        return {"model": model, "optimizer": kind([{"params": [p]} for p in model.parameters()], **options)}

    def make_one_group() -> State:
        model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Tanh(), nn.Linear(3, 2, bias=False))
        return {"model": model, "optimizer": kind(model.parameters(), **options)}

    compare(pipeline, make_one_group if kind is torch.optim.LBFGS else make)


def test_every_optimizer_is_there():
    assert {"Adam", "AdamW", "SGD", "LBFGS", "Adafactor", "RAdam"} <= set(KINDS) and len(OPTIMIZERS) > 45


def test_sparse_adam(pipeline):
    def make() -> State:
        model = nn.Embedding(6, 3, sparse=True)
        return {"model": model, "optimizer": torch.optim.SparseAdam(model.parameters())}

    def step(state: State) -> None:
        state["optimizer"].zero_grad()
        state["model"](torch.randint(0, 6, (4,))).square().sum().backward()
        state["optimizer"].step()

    compare(pipeline, make, step)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 10),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, step_size_up=3),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedulers(pipeline, make):
    def state() -> State:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return {"model": model, "optimizer": optimizer, "scheduler": make(optimizer)}

    compare(pipeline, state)


# -- modules ---------------------------------------------------------------------------------------------------------


def observed() -> nn.Module:
    return nn.Sequential(
        quantization.PerChannelMinMaxObserver(),
        nn.Linear(4, 3),
        quantization.FakeQuantize(observer=quantization.MovingAveragePerChannelMinMaxObserver),
        quantization.HistogramObserver(),
    )


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


MODULES: dict[str, Callable[[], nn.Module]] = {
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))),
    "traced": lambda: torch.jit.trace(nn.Linear(4, 3), torch.randn(5, 4)),
    "observed": observed,
    "tied": tied,
    "BatchNorm": lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)),
    "LSTM": lambda: nn.LSTM(4, 3),
    "MultiheadAttention": lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)),
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(4, 3)),
    "complex": lambda: nn.ParameterList([nn.Parameter(torch.randn(3, dtype=torch.complex64))]),
}


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_modules(pipeline, make):
    def state() -> State:
        model = make()
        return {"model": model, "optimizer": torch.optim.SGD([*model.parameters()], lr=0.01, momentum=0.9)}

    def step(each: State) -> None:
        if isinstance(each["model"], nn.ParameterList):
            each["optimizer"].zero_grad()
            each["model"][0].abs().sum().backward()
            each["optimizer"].step()
        else:
            plain_step(each)

    compare(pipeline, state, step)


@pytest.mark.parametrize("group", [False, True], ids=["replaced", "added"])
def test_a_parameter_that_is_replaced_or_added_midway(pipeline, group):
    def make() -> State:
        model = nn.Linear(4, 2)
        state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
        if group:
            model.more = nn.Parameter(torch.ones(2))
            state["optimizer"].add_param_group({"params": [model.more], "lr": 0.5})
        return state

    def step(state: State) -> None:
        plain_step(state)
        if not group and not hasattr(state["model"], "replaced"):
            state["model"].weight = nn.Parameter(torch.randn(2, 4))
            state["model"].replaced = True

    compare(pipeline, make, step)


# -- what is refused -------------------------------------------------------------------------------------------------


def holding(tensor: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.register_buffer("x", tensor)
    return module


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lazy": (lambda: nn.LazyLinear(2), "run the module once"),
    "meta": (lambda: nn.Linear(3, 2, device="meta"), "to_empty"),
    "COO": (lambda: holding(torch.eye(3).to_sparse()), "to_dense"),
    "CSR": (lambda: holding(torch.eye(3).to_sparse_csr()), "to_dense"),
    "nested": (lambda: holding(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])), "unbind"),
    "jagged": (
        lambda: holding(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)),
        "unbind",
    ),
    "quantized": (lambda: holding(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)), "int_repr"),
    "quantized Linear": (lambda: quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 2))), "int_repr"),
    "wrapper": (lambda: holding(TwoTensor(torch.ones(2), torch.ones(2))), "TwoTensor can't be saved"),
    "uint4": (lambda: holding(torch.ones(2, dtype=torch.uint8).view(torch.uint4)), r"view\(torch.uint8\)"),
}


@pytest.mark.parametrize(("make", "advice"), REFUSED.values(), ids=REFUSED)
def test_what_can_not_be_saved_is_refused_by_path_with_what_to_do(pipeline, make, advice):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = make()
    line = pipeline({"model": module, "v": rekindle.Values()})
    with pytest.raises(UnsupportedValueError, match=rf"^model\.[\w.\[\]]+: .*{advice}"):
        line.save()
