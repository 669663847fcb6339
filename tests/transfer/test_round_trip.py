"""Out by export, loaded by stock readers, back by import, restored: equal, bit for bit."""

from __future__ import annotations

import copy
import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, load_model
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import rekindle
from tests.faults.harness import Run, digest_of, train
from tests.faults.harness import restored as went_on_from
from tests.transfer.helpers import (
    FORMATS,
    Piece,
    Rank,
    all_of,
    assert_same,
    box_of,
    done,
    named,
    names,
    restored,
    run,
    same,
    taken_in,
    write,
)


class Awkward(torch.nn.Module):
    """A tensor of every kind that is easily lost."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(7, 4)
        self.linear = torch.nn.Linear(4, 3)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.low = torch.nn.Parameter(torch.randn(4, 2, dtype=torch.bfloat16))
        self.turned = torch.nn.Parameter(torch.randn(6, 7).t())
        self.register_buffer("f8", torch.randn(5).to(torch.float8_e4m3fn))
        self.register_buffer("e8", torch.randint(0, 255, (3,), dtype=torch.uint8).view(torch.float8_e8m0fnu))
        self.register_buffer("complex", torch.randn(3, 4, dtype=torch.complex64))
        self.register_buffer("wide", torch.randn((), dtype=torch.complex128))
        self.register_buffer("nothing", torch.empty(0, 4, dtype=torch.complex64))
        self.register_buffer("count", torch.randint(0, 1 << 62, (3,)))
        self.register_buffer("scalar", torch.tensor(float("nan")))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("unsigned", torch.tensor([65535, 0], dtype=torch.uint16))


def awkward(seed: int) -> dict[str, Any]:
    model = Awkward(seed)
    optimizer = torch.optim.AdamW(
        [{"params": [model.linear.weight]}, {"params": [model.low, model.turned, model.embedding.weight], "lr": 0.5}]
    )
    sum(p.float().square().sum() for group in optimizer.param_groups for p in group["params"]).backward()
    optimizer.step()
    values = rekindle.Values(
        numbers=numpy.arange(5) * seed,
        scalar=numpy.float32(seed),
        some={1, seed},
        more=frozenset([seed]),
        big=3**400 * seed,
        odd={(1, "k"): float("-inf"), "$array": [1]},
        pair=(torch.full((3,), seed), seed),
        image=torch.full((1, 2, 3, 4), seed).to(memory_format=torch.channels_last),
        nothing=None,
        text="\ud800" * seed,
    )
    return {"model": model, "optimizer": optimizer, "values": values}


def by_name(state: dict[str, Any]) -> Any:
    """The optimizer's state as torch.distributed.checkpoint calls it."""
    return get_optimizer_state_dict(state["model"], state["optimizer"])


def contents(state: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(entry.state_dict()) for name, entry in state.items()}


def assert_equal(ours: Any, theirs: Any, where: str = "") -> None:
    assert type(ours) is type(theirs), where
    if isinstance(ours, torch.Tensor):
        assert same(ours, theirs), where
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs), where
        for key in ours:
            assert_equal(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), where
        for one, other in zip(ours, theirs, strict=True):
            assert_equal(one, other, where)
    elif isinstance(ours, numpy.ndarray):
        assert ours.dtype == theirs.dtype and numpy.array_equal(ours, theirs), where
    else:
        assert ours == theirs, where


@pytest.fixture
def saved(memory: Path, root: Path) -> dict[str, Any]:
    """State whose step 3 is on storage."""
    state = awkward(1)
    random.seed(5)
    checkpointer = rekindle.Checkpointer(root, state)
    checkpointer.save(3, wait="durable")
    checkpointer.close()
    return state


@pytest.mark.parametrize("form", FORMATS)
def test_out_and_back(saved: dict[str, Any], root: Path, tmp_path: Path, form: str) -> None:
    drawn = random.random(), torch.rand(()).item()
    done("export", root, tmp_path / "out", "--format", form)
    told = taken_in(tmp_path / "out", tmp_path / "back", 7)
    assert (told["format"], told["step"], told["entries"]) == (form, 7, ["model", "optimizer", "values", "rng"])
    assert run("verify", tmp_path / "back").exit_code == 0

    fresh = awkward(2)
    restored(tmp_path / "back", fresh, 7)
    assert_equal(contents(saved), contents(fresh))
    assert fresh["model"].head.weight is fresh["model"].embedding.weight
    assert fresh["values"].image.is_contiguous(memory_format=torch.channels_last)
    assert (random.random(), torch.rand(()).item()) == drawn, "the generators"
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith((".tmp", ".partial"))]


def test_hugging_faces_layout_in_stock_readers(saved: dict[str, Any], root: Path, tmp_path: Path) -> None:
    told = done("export", root, 3, tmp_path / "hf", "--format", "safetensors", "--only", "model")
    assert told["files"] == ["model.safetensors", "rekindle.json"]
    loaded = load_file(tmp_path / "hf" / "model.safetensors")
    model = saved["model"].state_dict()
    odd = {name: loaded.pop(name) for name in ("complex", "wide", "nothing", "e8")}
    assert same(odd["complex"].view(torch.complex64).squeeze(-1), model["complex"]), "as bytes: see format.md"
    assert "head.weight" not in loaded, "tied, so stored once"
    assert_same(loaded, {name: model[name] for name in model if name in loaded})
    assert len(loaded) + len(odd) + 1 == len(model)

    tied = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(7, 4), "head": torch.nn.Linear(4, 7, bias=False)})
    tied["head"].weight = tied["embedding"].weight
    write(tmp_path / "tied", [Rank([all_of("m.embedding.weight", model["head.weight"])], tied_structure())])
    done("export", tmp_path / "tied", tmp_path / "tied-out", "--format", "safetensors", "--only", "m")
    assert load_model(tied, tmp_path / "tied-out" / "model.safetensors") == (set(), [])
    assert same(tied["head"].weight.detach(), model["head.weight"])


def tied_structure() -> dict[str, Any]:
    leaf = {"$tensor": "m.embedding.weight"}
    return {"m": {"embedding.weight": leaf, "head.weight": leaf}}


def test_files_of_a_limited_size_and_their_index(saved: dict[str, Any], root: Path, tmp_path: Path) -> None:
    told = done("export", root, tmp_path / "hf", "--format", "safetensors", "--max-shard-size", "0.2KiB")
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    assert told["files"] == [*files, "model.safetensors.index.json", "rekindle.json"]
    loaded = {name: load_file(tmp_path / "hf" / name) for name in files}
    for tensors in loaded.values():
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 204
    assert index["metadata"]["total_size"] == sum(t.nbytes for ts in loaded.values() for t in ts.values())
    assert {name: key for key, ts in loaded.items() for name in ts} == index["weight_map"]
    fresh = awkward(2)
    taken_in(tmp_path / "hf", tmp_path / "back", 3)
    restored(tmp_path / "back", fresh, 3)
    assert_equal(contents(saved), contents(fresh))


def test_transformers_loads_it(memory: Path, root: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    checkpointer = rekindle.Checkpointer(root, {"model": model})
    checkpointer.save(1, wait="durable")
    checkpointer.close()
    done("export", root, tmp_path / "hf", "--format", "safetensors", "--only", "model", "--max-shard-size", "10kB")
    config.save_pretrained(tmp_path / "hf")
    loaded, told = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))

    model.save_pretrained(tmp_path / "theirs", max_shard_size="10kB")
    taken_in(tmp_path / "theirs", tmp_path / "back")
    done("export", tmp_path / "back", tmp_path / "ours", "--format", "torch", "--only", "model")
    ours = torch.load(tmp_path / "ours", weights_only=True)
    assert_same(ours, {name: model.state_dict()[name] for name in ours})


def test_a_file_for_torch_load(saved: dict[str, Any], root: Path, tmp_path: Path) -> None:
    told = done("export", root, tmp_path / "state.pt", "--format", "torch")
    assert told["files"] == ["state.pt"] and told["bytes"] == (tmp_path / "state.pt").stat().st_size
    for mmap in (False, True):
        loaded = torch.load(tmp_path / "state.pt", weights_only=True, mmap=mmap)
        assert_same(dict(loaded["model"]), dict(saved["model"].state_dict()))
        assert loaded["model"]["head.weight"].data_ptr() == loaded["model"]["embedding.weight"].data_ptr(), "tied"
        assert_equal(loaded["optimizer"], by_name(saved))
        kept = saved["values"].numbers
        typed = loaded["values"]["numbers"]["$array"]
        assert typed[:2] == [kept.dtype.str, [5]], "what weights_only refuses is in its typed form"
        assert loaded["model"]["turned"].stride() == saved["model"].turned.stride() == (1, 7)
        assert loaded["optimizer"]["state"]["turned"]["exp_avg"].stride() == (1, 7)
        assert loaded["values"]["pair"][1] == 1 and loaded["values"]["some"] == {1}
    fresh = awkward(2)
    fresh["model"].load_state_dict(loaded["model"])
    set_optimizer_state_dict(fresh["model"], fresh["optimizer"], loaded["optimizer"])
    assert_equal(fresh["optimizer"].state_dict(), saved["optimizer"].state_dict())
    fresh["optimizer"].load_state_dict(loaded["optimizer"])  # torch's own goes by the order of the names
    assert_equal(fresh["optimizer"].state_dict(), saved["optimizer"].state_dict())

    done("export", root, tmp_path / "model.pt", "--format", "torch", "--only", "model")
    assert_same(torch.load(tmp_path / "model.pt", weights_only=True), dict(saved["model"].state_dict()))


def test_a_directory_for_dcp(saved: dict[str, Any], root: Path, tmp_path: Path) -> None:
    told = done("export", root, tmp_path / "dcp", "--format", "dcp")
    assert told["files"] == [".metadata", "__0_0.distcp", "rekindle.json"]
    fresh = awkward(2)
    state = {"model": fresh["model"].state_dict(), "optimizer": by_name(fresh)}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert_same(dict(state["model"]), dict(saved["model"].state_dict()))
    assert_equal(state["optimizer"], by_name(saved))
    state = {"values": {"numbers": None, "more": None}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert state["values"]["more"] == frozenset([1]) and state["values"]["numbers"].tolist() == [0, 1, 2, 3, 4]

    done("export", root, tmp_path / "dcp-model", "--format", "dcp", "--only", "model")
    state = fresh["model"].state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "dcp-model")
    assert_same(dict(state), dict(saved["model"].state_dict()))


def test_training_goes_on_bit_for_bit_from_what_came_back(root: Path, memory: Path, tmp_path: Path) -> None:
    assert train(Run(root, memory, steps=4, wait="durable")) == [0]
    unbroken = Run(tmp_path / "unbroken", memory, steps=8)
    assert train(unbroken) == [0]
    done("export", root, tmp_path / "out", "--format", "torch")
    taken_in(tmp_path / "out", tmp_path / "back", 4)
    again = Run(tmp_path / "back", memory, steps=8)
    assert train(again) == [0]
    assert went_on_from(again) == [4] and digest_of(again) == digest_of(unbroken)


def test_ranks_that_trained_together_are_exported_as_one(root: Path, memory: Path, tmp_path: Path) -> None:
    two = Run(root, memory, steps=3, world=2, wait="durable")
    assert train(two) == [0, 0]
    done("export", root, tmp_path / "out", "--format", "torch")
    taken_in(tmp_path / "out", tmp_path / "back", 3)
    again = Run(tmp_path / "back", memory, steps=3, world=2)
    assert train(again) == [0, 0]
    assert went_on_from(again, 1) == [3] and digest_of(again, 1) == digest_of(two)


# -- several ranks ---------------------------------------------------------------------------------------------------


def pieces() -> tuple[list[list[Piece]], dict[str, torch.Tensor]]:
    """The parts that three ranks have of a model, cut up in every way, and the model."""
    torch.manual_seed(3)
    rows = torch.randn(10, 4)
    columns = torch.randn(3, 9, dtype=torch.bfloat16)
    cube = torch.randint(0, 1 << 60, (4, 5, 6))
    f8 = torch.randn(8, 6).to(torch.float8_e4m3fn)
    turns = torch.randn(5, 4, dtype=torch.complex128)
    replica, scalar, empty = torch.randn(3, 3), torch.tensor(2.5), torch.empty(0, 3)
    own = [torch.full((2 + rank,), rank) for rank in range(3)]
    ranks = [
        [
            box_of("model.rows", rows, (0, 3), (0, 4)),  # uneven, and two boxes of it on one rank
            box_of("model.rows", rows, (9, 10), (0, 4)),
            box_of("model.columns", columns, (0, 3), (0, 2)),
            box_of("model.cube", cube, (0, 4), (0, 2), (0, 6)),
            box_of("model.f8", f8, (0, 8), (0, 3)),
            box_of("model.turns", turns, (0, 3), (0, 4)),  # overlaps the next rank's
            all_of("model.replica", replica),
            all_of("model.empty", empty),
        ],
        [
            box_of("model.rows", rows, (3, 4), (0, 4)),
            box_of("model.columns", columns, (0, 3), (2, 9)),
            box_of("model.cube", cube, (0, 4), (2, 5), (0, 1)),
            box_of("model.cube", cube, (0, 2), (2, 5), (1, 6)),
            box_of("model.turns", turns, (1, 5), (0, 4)),
            all_of("model.replica", replica),
            all_of("model.scalar", scalar),
        ],
        [
            box_of("model.rows", rows, (4, 9), (0, 4)),
            box_of("model.cube", cube, (2, 4), (2, 5), (1, 6)),
            box_of("model.f8", f8, (0, 8), (3, 6)),
            all_of("model.replica", replica),
        ],
    ]
    for rank, found in enumerate(ranks):
        found.append(all_of("model.own", own[rank], own=True))
    model = {"rows": rows, "columns": columns, "cube": cube, "f8": f8, "turns": turns, "replica": replica}
    return ranks, model | {"empty": empty, "own": own[0], "scalar": scalar}


@pytest.mark.parametrize("form", FORMATS)
def test_boxes_of_many_ranks_are_put_together(root: Path, memory: Path, tmp_path: Path, form: str) -> None:
    ranks, model = pieces()
    write(root, [Rank(found, named(*dict.fromkeys(piece.name for piece in found))) for found in ranks])
    done("export", root, tmp_path / "out", "--format", form)
    taken_in(tmp_path / "out", tmp_path / "back")
    done("export", tmp_path / "back", tmp_path / "again.pt", "--format", "torch")
    assert_same(torch.load(tmp_path / "again.pt", weights_only=True)["model"], model)
    if form == "dcp":
        state = {"model": {name: torch.zeros_like(tensor) for name, tensor in model.items()}}
        dcp.load(state, checkpoint_id=tmp_path / "out")
        assert_same(state["model"], model)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[int]], list[int]]:
    """A shape, where it is cut along each dimension, and which of three ranks has each of the boxes."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    marks = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    boxes = 1
    for along in marks:
        boxes *= len(along) - 1
    return shape, marks, draw(st.lists(st.integers(0, 6), min_size=boxes, max_size=boxes))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts())
def test_any_cut_comes_out_whole(
    tmp_path_factory: pytest.TempPathFactory, cut: tuple[tuple[int, ...], list[list[int]], list[int]]
) -> None:
    shape, marks, owners = cut
    directory = tmp_path_factory.mktemp("cut")
    tensor = torch.randn(shape)
    boxes: list[tuple[tuple[int, int], ...]] = [()]
    for along in marks:
        boxes = [(*box, span) for box in boxes for span in itertools.pairwise(along)]
    ranks: list[list[Piece]] = [[], [], []]
    for box, owner in zip(boxes, owners, strict=True):
        for rank in range(3):
            if (owner + 1) & (1 << rank):  # one to three ranks have it
                ranks[rank].append(box_of("model.w", tensor, *box))
    write(directory / "root", [Rank(found, named("model.w")) for found in ranks])
    done("export", directory / "root", directory / "out", "--format", "safetensors")
    assert same(load_file(directory / "out" / "model.safetensors")["model.w"], tensor)


def test_stages_and_sharded_optimizers_are_united(root: Path, memory: Path, tmp_path: Path) -> None:
    """Two stages of a pipeline, each with the optimizer's state of its own parameters."""

    def stage(rank: int) -> Rank:
        weight, average = f"model.{rank}.weight", f"optimizer.state.{rank}.weight.exp_avg"
        structure = {
            "model": {f"{rank}.weight": {"$tensor": weight}},
            "optimizer": {
                "state": {f"{rank}.weight": {"exp_avg": {"$tensor": average}, "step": {"$value": 0}}},
                "param_groups": [{"lr": {"$value": 1}, "params": [{"$value": 2}]}],
            },
            "progress": {"epoch": {"$value": 3}},
        }
        data = [all_of(weight, torch.full((2,), rank)), all_of(average, torch.full((2,), 10.0 + rank))]
        return Rank(data, structure, [5, 0.25, f"{rank}.weight", rank])

    write(root, [stage(0), stage(1)])
    done("export", root, tmp_path / "out", "--format", "torch")
    state = torch.load(tmp_path / "out", weights_only=True)
    assert list(state["model"]) == ["0.weight", "1.weight"] and state["progress"] == {"epoch": 0}
    assert state["optimizer"]["param_groups"] == [{"lr": 0.25, "params": ["0.weight", "1.weight"]}]
    assert state["optimizer"]["state"]["1.weight"]["exp_avg"].tolist() == [11.0, 11.0]


def test_one_entry_has_nothing_of_the_others(root: Path, memory: Path, tmp_path: Path) -> None:
    """Not even where it is tied to another one, and named after that."""
    structure = {
        "secret": {"key": {"$value": 0}, "w": {"$tensor": "secret.w"}},
        "model": {"w": {"$tensor": "secret.w"}},
    }
    write(root, [Rank([all_of("secret.w", torch.ones(3))], structure, ["hidden"])])
    for form in FORMATS:
        done("export", root, tmp_path / form, "--format", form, "--only", "model")
        files = [tmp_path / form] if form == "torch" else list((tmp_path / form).iterdir())
        assert not [path for path in files if b"hidden" in path.read_bytes() or b"secret" in path.read_bytes()]
        assert taken_in(tmp_path / form, tmp_path / f"back-{form}")["entries"] == ["model"]
        done("export", tmp_path / f"back-{form}", tmp_path / f"{form}.pt", "--format", "torch")
        assert torch.load(tmp_path / f"{form}.pt", weights_only=True)["model"]["w"].tolist() == [1, 1, 1]
    assert names((tmp_path / "safetensors").iterdir()) == ["model.safetensors", "rekindle.json"]


ODD = {
    "a.b": 1,
    "a": {"b": 2, "#0": 3},
    "a#0": 4,
    "$tensor": {"$int": 5},
    "$bytes": {"$$int": {"$dict": 6}},
    "$value": {"$tuple": {"x": 7, "y": 8}},
    "/": {"": 9, "x" * 1000: 10},
    "\x00": 11,
}


def odd(node: Any, more: int) -> Any:
    """Each number twice: as a tensor, and as a value."""
    if isinstance(node, dict):
        return {key: odd(child, more) for key, child in node.items()}
    return [torch.tensor([node + more]), node + more]


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_odd_names_out_and_back(root: Path, memory: Path, tmp_path: Path, form: str) -> None:
    live, twin = rekindle.Values(), rekindle.Values()
    live.load_state_dict(odd(ODD, 0))
    checkpointer = rekindle.Checkpointer(root, {"v": live})
    checkpointer.save(3, wait="durable")
    checkpointer.close()
    done("export", root, tmp_path / "out", "--format", form)
    taken_in(tmp_path / "out", tmp_path / "back", 7)
    restored(tmp_path / "back", {"v": twin}, 7)
    assert repr(twin.state_dict()) == repr(odd(ODD, 0))


def test_names_that_a_format_can_not_have_are_refused(root: Path, memory: Path, tmp_path: Path) -> None:
    state = {"v": rekindle.Values(), "w": rekindle.Values()}
    for entry, name in zip(state.values(), ("__metadata__", "a\ud800"), strict=True):
        entry.load_state_dict({name: torch.ones(1)})
    checkpointer = rekindle.Checkpointer(root, state)
    checkpointer.save(3, wait="durable")
    checkpointer.close()
    for entry in state:
        for form in ("safetensors", "dcp"):
            told = run("export", root, tmp_path / "out", "--format", form, "--only", entry)
            assert told.exit_code and "--format torch" in told.output and not (tmp_path / "out").exists()
        done("export", root, tmp_path / f"{entry}.pt", "--format", "torch", "--only", entry)
        assert torch.load(tmp_path / f"{entry}.pt", weights_only=True) == state[entry].state_dict()
