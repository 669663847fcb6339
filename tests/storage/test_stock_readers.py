"""A checkpoint is plain files: other people's readers load it, with nothing of Rekindle's in hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader

import rekindle
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.names import shard_name, step_dir
from rekindle.format.receipt import Receipt
from rekindle.save.capture import Capture
from rekindle.save.copy import ShardWriter
from rekindle.storage.posix import PosixStore


class Small(torch.nn.Module):
    """One tensor of every awkward kind."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = torch.nn.Linear(5, 3)
        self.low = torch.nn.Parameter(torch.randn(4, 2, dtype=torch.bfloat16))
        self.turned = torch.nn.Parameter(torch.randn(6, 7).t())
        self.register_buffer("count", torch.randint(0, 1 << 62, (3,)))
        self.register_buffer("scalar", torch.randn(()))
        self.register_buffer("empty", torch.empty(0, 4))
        self.register_buffer("channels", torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))


def assert_equal(loaded: dict[str, torch.Tensor], module: torch.nn.Module) -> None:
    expected = {f"model.{name}": tensor for name, tensor in module.state_dict().items()}
    assert expected.keys() <= loaded.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape, name
        assert torch.equal(loaded[name], tensor), name


def blank(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {f"model.{name}": torch.zeros_like(tensor) for name, tensor in module.state_dict().items()}


@pytest.fixture
def saved(memory: Path, root: Path) -> tuple[Small, Path]:
    model = Small(1)
    optimizer = torch.optim.AdamW(model.parameters())
    sum(p.float().sum() for p in model.parameters()).backward()
    optimizer.step()
    checkpointer = rekindle.Checkpointer(root, {"model": model, "optimizer": optimizer})
    checkpointer.save(1, wait="durable")
    checkpointer.close()
    return model, root / step_dir(1)


def test_stock_readers_load_what_a_checkpointer_wrote(saved):
    model, directory = saved
    assert_equal(load_file(directory / shard_name(0, 1)), model)

    state = blank(model)
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)
    assert_equal(state, model)

    fresh = Small(2)
    fresh.load_state_dict({name.removeprefix("model."): tensor for name, tensor in state.items()})
    assert_equal(blank(fresh) | {f"model.{n}": t for n, t in fresh.state_dict().items()}, model)


def write(root: Path, state: dict, rank: int = 0, world: int = 1) -> Path:
    """The real pipeline, without a process for each rank."""
    plan, values = Capture(state, rng=False).prepare()
    buffer = bytearray(plan.layout.file_bytes)
    writer = ShardWriter()
    _, sums = writer.write(plan, buffer, None, 1)
    writer.close()
    stamp = ShardId(1, rank, world, Incarnation(1, "a" * 16))
    store = PosixStore(root)
    receipt = Receipt.decode(Receipt.encode(stamp, plan.static, sums, values), "here")
    store.write_shard(receipt, memoryview(buffer), lambda nbytes: None)
    store.publish(stamp)
    return root / step_dir(1)


def test_torch_loads_a_checkpoint_of_several_ranks(root):
    model = Small(1)
    for rank in (0, 1):
        directory = write(root, {"model": model}, rank, 2)
    state = blank(model)
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)
    assert_equal(state, model)


def test_tied_weights_are_read_by_the_name_they_are_stored_under(root):
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(5, 4)
            self.head = torch.nn.Linear(4, 5, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied()
    loaded = load_file(write(root, {"model": model}) / shard_name(0, 1))
    assert list(loaded) == ["model.embedding.weight"]
    assert torch.equal(loaded["model.embedding.weight"], model.head.weight)


def test_dtypes_without_a_code_of_their_own_are_read_as_bytes(root):
    """A buffer of complex numbers, as rotary embeddings have, must not spoil the directory for torch."""
    module = torch.nn.Module()
    module.register_buffer("frequencies", torch.randn(3, 4, dtype=torch.complex64))
    module.register_buffer("plain", torch.randn(3))
    directory = write(root, {"model": module})
    raw = load_file(directory / shard_name(0, 1))["model.frequencies"]
    assert torch.equal(raw.view(torch.complex64).squeeze(-1), module.frequencies)

    state = {"model.frequencies": torch.zeros(3, 4, 8, dtype=torch.uint8), "model.plain": torch.zeros(3)}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)
    assert torch.equal(state["model.plain"], module.plain)
    assert torch.equal(state["model.frequencies"].view(torch.complex64).squeeze(-1), module.frequencies)
