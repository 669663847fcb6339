"""Sharded models in which something is unlike the others: all of it comes back, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rekindle
from tests.parallel.launch import on_ranks


def digest(tensors: Any) -> list[float]:
    return [round(float(tensor.double().abs().sum()), 5) for tensor in tensors]


def layers(count: int = 4, width: int = 16) -> Any:
    import torch

    torch.manual_seed(3)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(count)))


def update(model: Any, optimizer: Any, width: int = 16) -> None:
    import torch

    model(torch.ones(4, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def checkpointer(place: Path, **state: Any) -> rekindle.Checkpointer:
    return rekindle.Checkpointer(place / "run", state, memory="/proc/none")  # straight to storage


# -- FullyShardedDataParallel: layers of one shape, some of which have nothing on a rank ----------------------------


def saving_equal_layers(rank: int, world: int, place: Path, views: bool) -> dict[str, Any]:
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(layers(), device_id=torch.device("cpu"), use_orig_params=views)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ckpt = checkpointer(place, model=model, optimizer=optimizer)
    update(model, optimizer)
    ckpt.save(1, wait="durable")
    with FullyShardedDataParallel.summon_full_params(model):
        return {"weights": digest(p.detach() for p in model.parameters())}


@pytest.mark.parametrize("views", [False, True])
def test_layers_of_one_shape_are_not_taken_for_one(views: bool, tmp_path: Path) -> None:
    import torch

    expected = on_ranks(3, saving_equal_layers, tmp_path, views)[0]["weights"]
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    ckpt = checkpointer(tmp_path, model=model, optimizer=optimizer)
    assert ckpt.restore() == 1
    ckpt.close()
    assert digest(p.detach() for p in model.parameters()) == expected
    sums = digest(optimizer.state[p]["exp_avg"] for p in model.parameters())
    assert len(set(sums)) == len(sums), "each its own"


# -- fully_shard: an evaluation leaves the root's parameters gathered -------------------------------------------------


def evaluating_before_the_step(rank: int, world: int, place: Path) -> dict[str, Any]:
    import torch
    from torch.distributed.fsdp import fully_shard

    def build() -> tuple[Any, Any]:
        model = layers()
        fully_shard(model[0])
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = build()
    ckpt = checkpointer(place, model=model, optimizer=optimizer)
    update(model, optimizer)
    with torch.no_grad():
        model(torch.ones(2, 16))
    ckpt.save(1, wait="durable")
    ckpt.close()
    again, others = build()
    ckpt = checkpointer(place, model=again, optimizer=others)
    step = ckpt.restore()
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    same = all([torch.equal(a.full_tensor(), b.full_tensor()) for a, b in pairs])  # each is a collective
    return {"step": step, "same": same, "kept": len(others.state)}


def test_an_evaluation_before_the_step(tmp_path: Path) -> None:
    for answer in on_ranks(2, evaluating_before_the_step, tmp_path):
        assert answer.value == {"step": 1, "same": True, "kept": 8}, answer.trace


# -- stages that call different layers the same ----------------------------------------------------------------------


def stages_of_one_name(rank: int, world: int, place: Path, how: str) -> dict[str, Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))["data"]
    torch.manual_seed(rank // 2)
    bare = torch.nn.Linear(16, 16)
    if how == "ddp":
        model: Any = DistributedDataParallel(bare, process_group=mesh.get_group())
    else:
        model = fully_shard(bare, mesh=mesh)
    whole = [p.full_tensor() if how == "fsdp2" else p.detach() for p in bare.parameters()]
    expected = digest(whole)
    ckpt = checkpointer(place, model=model)
    ckpt.save(1, wait="durable")
    ckpt.close()
    with torch.no_grad():
        for parameter in bare.parameters():
            parameter.zero_()
    ckpt = checkpointer(place, model=model)
    ckpt.restore()
    whole = [p.full_tensor() if how == "fsdp2" else p.detach() for p in bare.parameters()]
    return {"expected": expected, "found": digest(whole)}


@pytest.mark.parametrize("how", [pytest.param("ddp", marks=pytest.mark.campaign(seconds=6)), "fsdp2"])
def test_stages_that_use_one_name_for_different_layers(how: str, tmp_path: Path) -> None:
    import torch

    answers = on_ranks(4, stages_of_one_name, tmp_path, how)
    for answer in answers:
        assert answer["found"] == answer["expected"]
    assert answers[0]["found"] != answers[2]["found"]
    ckpt = checkpointer(tmp_path, model=torch.nn.Linear(16, 16))
    with pytest.raises(rekindle.StateMismatchError, match="can't tell whose is whose"):
        ckpt.restore()
    ckpt.close()


# -- optimizers -----------------------------------------------------------------------------------------------------


def sharing_out_updates(rank: int, world: int, place: Path) -> dict[str, Any]:
    """All ranks list all parameters; each updates, and keeps something of, its own, and sends it to the others."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    class Shared(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            every = [p for group in self.param_groups for p in group["params"]]
            gradients = [p.grad for p in every]
            for number, parameter in enumerate(every):
                if number % world != rank:
                    parameter.grad = None
            super().step(closure)
            for number, (parameter, gradient) in enumerate(zip(every, gradients, strict=True)):
                dist.broadcast(parameter.data, number % world)
                parameter.grad = gradient

    def build() -> tuple[Any, Any]:
        model = DistributedDataParallel(layers())
        return model, Shared(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = build()
    ckpt = checkpointer(place, model=model, optimizer=optimizer)
    update(model, optimizer)
    ckpt.save(1, wait="durable")
    ckpt.close()
    again, others = build()
    ckpt = checkpointer(place, model=again, optimizer=others)
    step = ckpt.restore()
    own = [n for n, p in enumerate(model.parameters()) if p in optimizer.state]
    found = [list(m.parameters())[n] for n in own for m in (model, again)]
    buffers = [o.state[p]["momentum_buffer"] for o, p in zip([optimizer, others] * len(own), found, strict=True)]
    same = all(torch.equal(a, b) for a, b in zip(buffers[::2], buffers[1::2], strict=True))
    return {"step": step, "same": same, "own": len(own)}


def test_an_optimizer_whose_ranks_share_out_the_updates(tmp_path: Path) -> None:
    for answer in on_ranks(2, sharing_out_updates, tmp_path):
        assert answer.value == {"step": 1, "same": True, "own": 4}, answer.trace


def nested_state(rank: int, world: int, place: Path) -> dict[str, Any]:
    """What an optimizer keeps in dictionaries and lists of its own, of sharded parameters and of none."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model = fully_shard(layers(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        optimizer.state[parameter]["q"] = {"m": parameter.detach() * 2, "l": [parameter.detach() * 3]}
    optimizer.state["global"] = {"seen": torch.arange(3), "n": 4}
    ckpt = checkpointer(place, model=model, optimizer=optimizer)
    ckpt.save(1, wait="durable")
    ckpt.close()
    others = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = checkpointer(place, model=model, optimizer=others)
    ckpt.restore()
    right = True
    for parameter in model.parameters():
        q = others.state[parameter]["q"]
        right &= isinstance(q["m"], DTensor) and torch.equal(q["m"].full_tensor(), 2 * parameter.full_tensor())
        right &= isinstance(q["l"][0], DTensor) and torch.equal(q["l"][0].full_tensor(), 3 * parameter.full_tensor())
    beside = others.state["global"]
    return {"right": bool(right), "beside": [beside["seen"].tolist(), beside["n"]]}


def test_what_an_optimizer_keeps_deeper_down(tmp_path: Path) -> None:
    for answer in on_ranks(2, nested_state, tmp_path):
        assert answer.value == {"right": True, "beside": [[0, 1, 2], 4]}, answer.trace


def test_a_head_of_another_size_leaves_its_optimizer_state_too(tmp_path: Path) -> None:
    import torch

    def build(classes: int) -> tuple[Any, Any]:
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, classes))
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = build(8)
    update(model, optimizer)
    ckpt = checkpointer(tmp_path, optimizer=optimizer, model=model)
    ckpt.save(1, wait="durable")
    ckpt.close()
    model, optimizer = build(10)
    ckpt = checkpointer(tmp_path, optimizer=optimizer, model=model)
    assert ckpt.restore(partial=True) == 1
    assert [p in optimizer.state for p in model.parameters()] == [True, True, False, False]
    update(model, optimizer)
    ckpt.close()


def test_another_kind_of_optimizer_is_refused(tmp_path: Path) -> None:
    import torch

    model = layers(1)
    ckpt = checkpointer(tmp_path, model=model, optimizer=torch.optim.AdamW(model.parameters()))
    ckpt.save(1, wait="durable")
    ckpt.close()
    ckpt = checkpointer(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(rekindle.StateMismatchError, match="another kind of optimizer"):
        ckpt.restore()
    ckpt.close()
