"""Parameters that are trained and not saved: an error before anything is written, and none for what is held."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import rekindle
from rekindle.save.capture import Capture
from rekindle.save.missing import describe_missing


def sgd(*modules: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": list(module.parameters())} for module in modules], lr=0.1, momentum=0.9)


def missing(**state: object) -> str:
    return describe_missing(Capture(state).state)


def test_a_module_that_is_trained_and_not_saved_is_refused_before_anything_is_written(root: Path, memory: Path) -> None:
    model, head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)
    state = {"model": model, "optimizer": sgd(model, head)}
    with pytest.raises(rekindle.UsageError, match="allow_missing=True") as caught:
        rekindle.Checkpointer(root, state)
    assert "optimizer.param_groups[1]: float32[3, 4], float32[3]." in str(caught.value)
    assert not root.exists()
    ckpt = rekindle.Checkpointer(root, state, allow_missing=True)
    ckpt.restore()
    head(model(torch.ones(1, 4))).sum().backward()
    state["optimizer"].step()  # type: ignore[attr-defined]
    ckpt.step(1)
    ckpt.close()
    assert ckpt.metrics.failed == 0


def test_one_of_many_parameters_is_found_and_the_message_is_bounded() -> None:
    model, lost = torch.nn.Linear(4, 4), torch.nn.ParameterList(torch.zeros(2) for _ in range(50))
    found = missing(model=model, optimizer=torch.optim.SGD([*model.parameters(), *lost], lr=1))
    assert found == "optimizer.param_groups[0]: " + "float32[2], " * 5 + "float32[2] and 44 more"


def test_master_weights_of_an_optimizer_alone_are_missing() -> None:
    model = torch.nn.Linear(4, 4).bfloat16()
    masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=1)
    assert missing(model=model, optimizer=optimizer) == "optimizer.param_groups[0]: float32[4, 4], float32[4]"
    assert not missing(model=model, optimizer=optimizer, masters=rekindle.Values(all=masters))


class Trainer:
    """Keeps a model to itself, and gives copies of its tensors."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, object]:
        return {"weights": copy.deepcopy(self.model.state_dict())}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.model.load_state_dict(state["weights"])  # type: ignore[arg-type]


class Arrays(Trainer):
    """Gives NumPy arrays."""

    def state_dict(self) -> dict[str, object]:
        return {key: value.numpy().copy() for key, value in self.model.state_dict().items()}


class Vector(Trainer):
    """Gives all parameters as one vector."""

    def state_dict(self) -> dict[str, object]:
        vector = torch.nn.utils.parameters_to_vector(self.model.parameters()).detach()
        return {"vector": vector, "generator": torch.get_rng_state()}


class VectorArray(Vector):
    """Gives all parameters as one vector of NumPy's."""

    def state_dict(self) -> dict[str, object]:
        return {key: value.numpy() for key, value in super().state_dict().items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [Arrays, Vector, VectorArray])
def test_copies_as_arrays_and_vectors_hold_what_they_have_room_for(kind: type[Trainer]) -> None:
    model, head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)
    assert not missing(trainer=kind(model), optimizer=sgd(model))
    assert not missing(trainer=kind(model), head=head, optimizer=sgd(model, head))
    found = missing(trainer=kind(model), optimizer=sgd(model, head))
    assert "optimizer.param_groups[1]: float32[3, 4], float32[3]" in found, "no room for both"


def test_what_is_held_in_any_other_way_is_not_missing() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = sgd(model)
    assert not missing(whole=model, optimizer=optimizer)
    assert not missing(first=model[0], second=model[1], optimizer=optimizer), "parts of it"
    assert not missing(trainer=Trainer(model), optimizer=optimizer), "an object of its own, by copies"
    assert not missing(weights=rekindle.Values(**dict(model.named_parameters())), optimizer=optimizer)
    assert not missing(model=torch.compile(model), optimizer=optimizer)
    assert not missing(model=model, optimizer=optimizer, values=rekindle.Values(param_groups=[1, 2])), "no optimizer"
    model.requires_grad_(False)
    assert not missing(other=torch.nn.Linear(2, 2), optimizer=optimizer), "frozen, so no update changes it"


def test_tied_frozen_and_moved_parameters_are_not_missing() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    optimizer = sgd(model)
    model.to(torch.float64)
    model[1].bias.requires_grad_(False)
    torch.nn.utils.parametrize.register_parametrization(model[0], "weight", torch.nn.Identity())
    assert not missing(model=model, optimizer=optimizer)
