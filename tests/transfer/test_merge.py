"""Tests how the states of ranks are merged: pure structures, and those of real state."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch

import rekindle
from rekindle.errors import CorruptError
from rekindle.format.layout import Chunk, Layout
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.receipt import Receipt
from rekindle.save.capture import Capture
from rekindle.state.tree import FlatState, assemble, describe, flatten
from rekindle.transfer.merge import extract_part, find_tensors, merge

WORLD = 3


def whole(name: str, size: int = 4, own: bool = False, dtype: str = "float32") -> Chunk:
    return Chunk(name, dtype, (size,), (0,), (size,), own=own)


def receipt(rank: int, state: dict[str, Any], chunks: list[Chunk] | None = None) -> Receipt:
    """The receipt of rank ``rank`` for a nested ``state``, whose tensors are stored by the names of their places."""
    description = describe(state)
    for leaf in description.leaves:
        leaf.node["$tensor"] = leaf.name
    flat = FlatState()
    flatten(state, flat)
    values = json.loads(json.dumps([_typed(value) for value in flat.values]))
    layout = Layout.build(chunks if chunks is not None else [whole(leaf.name) for leaf in description.leaves])
    stamp = ShardId(1, rank, WORLD, Incarnation(1, "a" * 16))
    sums = ["0" * 16] * len(layout.blocks)
    static = Receipt.static_part(layout, description.structure)
    return Receipt.decode(Receipt.encode(stamp, static, sums, json.dumps(values).encode()), "here")


def _typed(value: Any) -> Any:
    from rekindle.state.codec import encode

    return encode(value)


def united(*states: dict[str, Any]) -> Any:
    """The state of all ranks, with names for tensors."""
    merged = merge([receipt(rank, state) for rank, state in enumerate(states)])
    return assemble(merged.structure, merged.values, lambda name: name, allow_pickle=False)  # type: ignore[arg-type,return-value]


T = torch.zeros(1)


def test_stages_of_a_pipeline_have_all_keys_together():
    first = {"model": {"0.weight": T, "0._extra_state": "a"}, "epoch": {"n": 1}}
    last = {"model": {"1.weight": T, "1._extra_state": "b"}, "epoch": {"n": 2}}
    assert united(first, last) == {
        "model": {
            "0.weight": "model.0.weight",
            "0._extra_state": "a",
            "1.weight": "model.1.weight",
            "1._extra_state": "b",
        },
        "epoch": {"n": 1},
    }


def test_what_is_no_module_is_the_lowest_ranks_but_for_tensors():
    first = {"loader": {"place": 1, "kept": {"a": [1]}}, "average": {"of": {"x": T}, "n": 1}}
    second = {"loader": {"place": 2, "more": 3, "kept": {"a": [2], "b": 1}}, "average": {"of": {"y": T}, "n": 2}}
    third = {"only": {"here": 5}, "average": {"deep": {"er": {"z": T}}}}
    assert united(first, second, third) == {
        "loader": {"place": 1, "kept": {"a": [1]}},
        "average": {
            "of": {"x": "average.of.x", "y": "average.of.y"},
            "n": 1,
            "deep": {"er": {"z": "average.deep.er.z"}},
        },
        "only": {"here": 5},
    }


def adam(groups: list[dict[str, Any]], *names: Any) -> dict[str, Any]:
    kept = {name: {"step": 1, "exp_avg": T} for name in names}
    return {"optimizer": {"state": kept, "param_groups": groups}}


def test_optimizers_have_the_state_of_all_parameters_and_each_its_options():
    merged = united(
        adam([{"lr": 1.0, "params": ["a"]}, {"lr": 2.0, "params": ["b"]}], "a", "b"),
        adam([{"lr": 1.0, "params": ["c"]}, {"lr": 2.0, "params": ["b", "d"]}], "c", "d"),
        adam([{"lr": 2.0, "params": ["e"]}, {"lr": 3.0, "params": ["f"]}], "e", "f"),
    )["optimizer"]
    assert list(merged["state"]) == ["a", "b", "c", "d", "e", "f"]
    assert merged["state"]["d"] == {"step": 1, "exp_avg": "optimizer.state.d.exp_avg"}
    assert merged["param_groups"] == [
        {"lr": 1.0, "params": ["a", "c"]},
        {"lr": 2.0, "params": ["b", "d", "e"]},
        {"lr": 3.0, "params": ["f"]},
    ]


def test_groups_of_equal_options_stay_apart():
    groups = [{"lr": 1.0, "params": [0]}, {"lr": 1.0, "params": [1]}]
    more = [{"lr": 1.0, "params": []}, {"lr": 1.0, "params": [2, "x"]}]
    merged = united(adam(groups, 0, 1), adam(more, 2, "x"))["optimizer"]
    assert [group["params"] for group in merged["param_groups"]] == [[0], [1, 2, "x"]]
    assert list(merged["state"]) == [0, 1, 2, "x"]


def test_parameters_of_which_an_optimizer_keeps_only_values_are_not_lost():
    first = {"optimizer": {"state": {"a": {"momentum_buffer": None}}, "param_groups": [{"params": ["a"]}]}}
    second = {"optimizer": {"state": {"b": {"momentum_buffer": None}}, "param_groups": [{"params": ["b"]}]}}
    assert united(first, second)["optimizer"] == {
        "state": {"a": {"momentum_buffer": None}, "b": {"momentum_buffer": None}},
        "param_groups": [{"params": ["a", "b"]}],
    }


def test_groups_that_name_no_parameters_are_the_lowest_ranks():
    merged = united(adam([{"lr": 1.0}, {"lr": 2.0}], 0), adam([{"lr": 1.0}, {"lr": 2.0}], 1))["optimizer"]
    assert merged["param_groups"] == [{"lr": 1.0}, {"lr": 2.0}]
    assert list(merged["state"]) == [0, 1]


def test_options_that_are_tensors_are_compared_by_name():
    merged = united(adam([{"lr": T, "params": ["a"]}], "a"), adam([{"lr": T, "params": ["b"]}], "b"))["optimizer"]
    assert merged["param_groups"] == [{"lr": "optimizer.param_groups.0.lr", "params": ["a", "b"]}]


def test_an_entry_that_is_no_optimizer_may_have_its_keys():
    odd = {"x": {"state": 1, "param_groups": {"a": 2}}}
    assert united(odd, odd) == odd
    assert united({"x": {"state": T}}, {"x": 5}) == {"x": {"state": "x.state"}}
    assert united({"x": (1, [2])}, {"x": {"y": T}}) == {"x": (1, [2])}


def test_boxes_of_all_ranks_and_own_tensors_of_the_lowest():
    def halves(rank: int) -> list[Chunk]:
        return [
            Chunk("m.w", "float32", (4,), (2 * rank,), (2,)),
            Chunk("m.w", "float32", (4,), (0,), (0,)),
            whole("m.buffer", 3 + rank, own=True),
        ]

    tensors = merge([receipt(rank, {"m": {"w": T, "buffer": T}}, halves(rank)) for rank in (0, 1)]).tensors
    assert [(part.receipt, part.box.offsets) for part in tensors["m.w"].parts if part.box.volume] == [
        (0, (0,)),
        (1, (2,)),
    ]
    assert [part.receipt for part in tensors["m.buffer"].parts] == [0]
    assert tensors["m.buffer"].shape == (3,)


@pytest.mark.parametrize("other", [whole("m.w", 5), whole("m.w", dtype="int32")], ids=["shape", "dtype"])
def test_ranks_that_disagree_on_a_tensor_are_told_apart(other: Chunk):
    with pytest.raises(CorruptError, match=r"'m\.w' is .* on rank 1, and float32\[4\] on a lower one"):
        merge([receipt(0, {"m": {"w": T}}), receipt(1, {"m": {"w": T}}, [other])])


def test_one_rank_alone_is_told_as_it_is():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    model[1].weight = torch.nn.Parameter(model[0].weight[:2].detach())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    odd = rekindle.Values(
        c=Counter("aab"), o=OrderedDict(z=1, a=[(1, {2: "x"})]), d={(1, "k"): 5, "$x": 1}, t=(torch.ones(2), {3})
    )
    state = {"model": model, "optimizer": optimizer, "odd": odd}
    plan, values = Capture(state).prepare()
    stamp = ShardId(1, 0, 1, Incarnation(1, "a" * 16))
    sums = ["0" * 16] * len(plan.layout.blocks)
    saved = Receipt.decode(Receipt.encode(stamp, plan.static, sums, values), "here")
    merged = merge([saved])

    def built(structure: Any, values: list[Any]) -> str:
        """Order and types count."""
        return repr(assemble(structure, values, lambda name: name, allow_pickle=False))  # type: ignore[arg-type,return-value]

    assert built(merged.structure, merged.values) == built(saved.structure, saved.values)
    assert merged.structure.keys() == {"model", "optimizer", "odd", "rng"}


def test_a_part_has_its_own_values_and_names():
    merged = merge([receipt(0, {"a": {"x": T, "n": 1}, "b": {"x": T, "n": [2, (3, T)]}})])
    assert list(find_tensors(merged.structure)) == [("a.x", "a.x"), ("b.x", "b.x"), ("b.n.1.1", "b.n.1.1")]
    structure, values = extract_part(merged.structure["b"], merged.values, {"b.x": "x", "b.n.1.1": "y"})
    assert values == [2, 3]
    assert assemble(structure, values, str, allow_pickle=False) == {"x": "x", "n": [2, (3, "y")]}  # type: ignore[arg-type]
