"""Tests load_model: the weights alone, into any wrapping, from memory or storage."""

from __future__ import annotations

import json
import os
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import rekindle
from rekindle.format.names import shard_name, step_dir
from rekindle.integrations.peft import without_frozen_base
from tests.parallel.launch import on_ranks
from tests.stored import steps_on

WIDE = 512


def net(seed: int = 0, wide: int = 8) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(wide, wide), torch.nn.BatchNorm1d(wide), torch.nn.Linear(wide, 2))


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, wide: int = 8) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, wide)).square().mean().backward()
    optimizer.step()


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def saved(root: Path, state: dict[str, Any], *steps: int, wide: int = 8) -> list[dict[str, torch.Tensor]]:
    """Trains ``state`` and saves these steps. Returns the weights of each."""
    found = []
    with rekindle.Checkpointer(root, state, keep=10) as ckpt:
        for step in steps:
            trained(next(iter(state.values())), state["optimizer"], wide)
            ckpt.save(step, wait="durable", timeout=60, pin=False)
            found.append(deepcopy(next(iter(state.values())).state_dict()))
    return found


class Run(NamedTuple):
    """A run that is over, with its steps 1 and 2."""

    root: Path
    first: dict[str, torch.Tensor]
    second: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("over") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REKINDLE_MEMORY", str(tmp_path_factory.mktemp("memory")))
        return Run(root, *saved(root, state_of(net()), 1, 2))


def assert_same(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    assert list(model.state_dict()) == list(weights)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


def bytes_read() -> int:
    """Returns the bytes that this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="needs Linux's /proc")
def test_nothing_but_the_weights_is_read_or_changed(root: Path, memory: Path) -> None:
    (weights,) = saved(root, state_of(net(0, WIDE)), 1, wide=WIDE)
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    model = net(1, WIDE)
    assert rekindle.load_model(root, model) == 1  # what the first call imports is read, too
    assert_same(model, weights)
    there = sorted(root.rglob("*"))
    model = net(2, WIDE)
    drawn, before = torch.random.get_rng_state(), bytes_read()
    assert rekindle.load_model(root, model) == 1
    assert nbytes <= bytes_read() - before < 1.2 * nbytes  # all of the state is three times that
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert_same(model, weights)
    assert sorted(root.rglob("*")) == there and all(parameter.requires_grad for parameter in model.parameters())


def test_the_memory_of_a_live_run_is_read_first(root: Path, memory: Path) -> None:
    state, model = state_of(net()), net(1)
    ckpt = rekindle.Checkpointer(root, state, persist_seconds=3600)
    trained(state["model"], state["optimizer"])
    ckpt.save(1, wait="durable", timeout=60)
    older = deepcopy(state["model"].state_dict())
    trained(state["model"], state["optimizer"])
    ckpt.step(2)
    assert steps_on(root) == [1]
    assert rekindle.load_model(root, model) == 2
    assert_same(model, state["model"].state_dict())
    assert rekindle.load_model(root, model, 1) == 1
    assert_same(model, older)
    trained(state["model"], state["optimizer"])
    ckpt.step(3)  # the run goes on as if nothing had been read
    ckpt.close(timeout=60)


def test_the_step_is_chosen_by_number_or_by_its_directory(over: Run, root: Path, memory: Path) -> None:
    first, second = over.first, over.second
    shutil.copytree(over.root, root)
    model = net(1)
    assert rekindle.load_model(root / step_dir(2), model) == 2
    assert_same(model, second)
    assert rekindle.load_model(str(root), model, 1) == 1
    assert_same(model, first)
    with pytest.raises(rekindle.UsageError, match="is the directory of step 2, and step=1 asks for another"):
        rekindle.load_model(root / step_dir(2), model, 1)
    for step in (True, 1.0, "newest", -1):
        with pytest.raises(rekindle.UsageError, match="load_model"):
            rekindle.load_model(root, model, step)  # type: ignore[arg-type]
    with pytest.raises(rekindle.NotFoundError, match="no checkpoint of step 7: it has 1, 2"):
        rekindle.load_model(root, model, 7)
    with pytest.raises(rekindle.NotFoundError, match="no checkpoint has a metric"):
        rekindle.load_model(root, model, "best")
    with pytest.raises(rekindle.NotFoundError, match=r"no checkpoint: .*no such directory"):
        rekindle.load_model(root / "elsewhere", model)
    assert_same(model, first)
    shard = root / step_dir(2) / shard_name(0, 1)
    data = bytearray(shard.read_bytes())
    data[4096] ^= 1  # the first byte of the first tensor, an integer of the model's
    shard.write_bytes(data)
    with pytest.raises(rekindle.CorruptError, match=r"no checkpoint of step 2 can be read.*differs from its checksum"):
        rekindle.load_model(root, model, 2)
    assert rekindle.load_model(root, model) == 1
    assert_same(model, first)


def test_what_does_not_fit_is_named_as_torch_does(over: Run, memory: Path) -> None:
    root, weights = over.root, over.second
    other = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.Identity(), torch.nn.Linear(8, 3), torch.nn.Linear(3, 1)
    )
    untouched = deepcopy(other.state_dict())
    with pytest.raises(rekindle.StateMismatchError) as caught:
        rekindle.load_model(root, other)
    lines = str(caught.value).split("\n\t")
    assert lines[0] == "step 2 does not fit Sequential:"
    assert lines[1] == 'Missing key(s) in state_dict: "3.bias", "3.weight".'
    assert lines[2].startswith('Unexpected key(s) in state_dict: "1.bias", "1.num_batches_tracked"')
    assert lines[3:] == [
        "size mismatch for 2.bias: live float32[3], saved float32[2].",
        "size mismatch for 2.weight: live float32[3, 8], saved float32[2, 8].",
    ]
    with pytest.raises(rekindle.StateMismatchError, match=r"size mismatch for 2\.bias") as caught:
        rekindle.load_model(root, other, strict=False)
    assert "Missing" not in str(caught.value)
    assert_same(other, untouched)
    with pytest.raises(RuntimeError, match="size mismatch"):  # torch's own rule, which this follows
        other.load_state_dict(weights, strict=False)


def test_a_warm_start_takes_what_there_is(over: Run, memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, weights = over.root, over.first
    torch.manual_seed(5)
    wider = torch.nn.Sequential(*net(1)[:2], torch.nn.Identity(), torch.nn.Linear(8, 5))
    head = wider[3].weight.detach().clone()
    with pytest.raises(rekindle.StateMismatchError, match=r'Missing key.*"3.bias"'):
        rekindle.load_model(root, wider, 1)
    assert rekindle.load_model(root, wider, 1, strict=False) == 1
    assert torch.equal(wider[0].weight, weights["0.weight"]) and torch.equal(
        wider[1].running_var, weights["1.running_var"]
    )
    assert torch.equal(wider[3].weight, head)
    assert 'lacks 2 weights of the model, left as they were: "3.bias", "3.weight"' in caplog.text
    assert 'no place for 2 of step 1\'s weights: "2.bias", "2.weight"' in caplog.text
    odd = torch.nn.Module()
    odd.register_parameter("odd", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(rekindle.StateMismatchError, match=r'Missing key.*"odd"'):
        rekindle.load_model(root, odd, strict=False)


def test_weights_are_cast_to_the_dtype_of_the_model(over: Run, memory: Path) -> None:
    root, weights = over.root, over.second
    model = net(1).to(torch.bfloat16)
    assert rekindle.load_model(root, model) == 2
    assert model[0].weight.dtype == torch.bfloat16
    assert_same(model, {name: weights[name].to(tensor.dtype) for name, tensor in model.state_dict().items()})
    counting = torch.nn.Sequential(torch.nn.Linear(8, 8), net()[1], torch.nn.Linear(8, 2))
    counting[1].running_mean = torch.zeros(8, dtype=torch.int64)
    with pytest.raises(
        rekindle.StateMismatchError, match=r"mismatch for 1.running_mean: live int64\[8\], saved float32"
    ):
        rekindle.load_model(root, counting)
    with torch.device("meta"):
        hollow = net()
    with pytest.raises(rekindle.UsageError, match="meta device"):
        rekindle.load_model(root, hollow)


def test_the_model_is_found_whatever_it_is_called(root: Path, memory: Path) -> None:
    model = net()
    state = {"net": model, "optimizer": torch.optim.AdamW(model.parameters()), "critic": torch.nn.Linear(3, 3)}
    (weights,) = saved(root, state, 1)
    other, critic = net(1), torch.nn.Linear(3, 3)
    assert rekindle.load_model(root, other) == rekindle.load_model(root, critic) == 1
    assert_same(other, weights)
    assert_same(critic, state["critic"].state_dict())
    with pytest.raises(
        rekindle.NotFoundError, match="no entry 'ema' in its state: it has 'net', 'optimizer', 'critic'"
    ):
        rekindle.load_model(root, other, entry="ema")

    twice = root.parent / "twice"
    average = deepcopy(model)
    (weights,) = saved(twice, {"net": model, "optimizer": state["optimizer"], "ema": average}, 1)
    with pytest.raises(rekindle.UsageError, match=r"several entries of the state have .*entry='net'"):
        rekindle.load_model(twice, other)
    assert rekindle.load_model(twice, other, entry="ema") == 1
    assert_same(other, average.state_dict())
    assert not torch.equal(average[0].weight, weights["0.weight"])


def test_what_a_peft_adapter_has_saved_loads_into_such_a_model(root: Path, memory: Path) -> None:
    def tuned(seed: int) -> torch.nn.Module:
        model = net(seed)
        model.peft_config = {}  # by which the adapters know one
        model[0].requires_grad_(False)
        return model

    model = tuned(0)
    part = without_frozen_base(model)
    with rekindle.Checkpointer(root, {"model": part}) as ckpt:
        ckpt.save(1, wait="durable", timeout=60)
    other = tuned(1)
    base = other[0].weight.detach().clone()
    assert rekindle.load_model(root, without_frozen_base(other)) == 1
    assert torch.equal(other[0].weight, base) and torch.equal(other[2].weight, model[2].weight)


# -- several ranks ---------------------------------------------------------------------------------------------------


def save_sharded(rank: int, world: int, root: str) -> dict[str, Any]:
    model = net(rank).requires_grad_()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    fully_shard(model, mesh=mesh)
    state = state_of(model)
    with rekindle.Checkpointer(root, state) as ckpt:
        model(torch.ones(4, 8)).square().mean().backward()
        state["optimizer"].step()
        ckpt.save(1, wait="durable", timeout=60)
    whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    return {"weights": {key: tensor.tolist() for key, tensor in whole.items()}}


def load_wrapped(rank: int, world: int, root: str, kind: str) -> dict[str, Any]:
    model: torch.nn.Module = net(7 + rank)
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    else:
        model = DistributedDataParallel(model)
    step = rekindle.load_model(root, model)
    whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    return {"step": step, "weights": {key.removeprefix("module."): tensor.tolist() for key, tensor in whole.items()}}


def test_what_shards_have_saved_loads_into_one_module(root: Path, memory: Path) -> None:
    answers = on_ranks(2, save_sharded, str(root))
    model = net(3)
    assert rekindle.load_model(root, model) == 1
    ours = {key: tensor.tolist() for key, tensor in model.state_dict().items()}
    sharded = [key for key in ours if not key.startswith("1.")]  # buffers are each rank's own
    assert {key: ours[key] for key in sharded} == {key: answers[0]["weights"][key] for key in sharded}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_one_modules_weights_load_into_wrapped_ones(kind: str, over: Run, memory: Path) -> None:
    expected = json.loads(json.dumps({key: tensor.tolist() for key, tensor in over.second.items()}))
    for answer in on_ranks(2, load_wrapped, str(over.root), kind):
        assert answer["step"] == 2 and answer["weights"] == expected
