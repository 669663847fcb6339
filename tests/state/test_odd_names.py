"""Names as odd as Python and torch allow: each leads back to its own tensor and value."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import rekindle
from rekindle.format.layout import Chunk, Layout
from rekindle.save.capture import Capture

MARKS = [
    *["$tensor", "$value", "$dict", "$ordered", "$tuple", "$pickle", "$", "~", "a~", "a", "a#0", "a#1", "#0"],
    *["__metadata__", "_orig_mod", "my_orig_mod", "_fsdp_wrapped_module", "module", "state", "params", "0", "a\\ud800"],
    *["\ud83d\ude00", "\U0001f600", "a\ud800", "\x00", "é", "e\u0301", " ", "/", "x" * 10_000],
]
DOTS = ["", ".", "..", "../x", "a.b", "a.b.c", "a.", ".a"]
inner_names = st.one_of(st.sampled_from(MARKS), st.text(st.characters(), min_size=1).filter(lambda n: "." not in n))
names = st.one_of(inner_names, st.sampled_from(DOTS), st.text(st.characters()))
trees = st.recursive(
    st.sampled_from([torch.float32, None]),
    lambda inner: st.dictionaries(names, inner, min_size=1, max_size=4),
    max_leaves=8,
)
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def filled(tree: Any, count: list[int]) -> Any:
    """The tree with a number of its own at each leaf: as a tensor, or as a value."""
    if isinstance(tree, dict):
        return {key: filled(child, count) for key, child in tree.items()}
    count[0] += 1
    return count[0] if tree is None else torch.tensor([count[0]], dtype=tree)


def plain(tree: Any) -> Any:
    """Tensors as lists, keys as the numbers of their characters: what compares bit for bit, and shows what differs."""
    if isinstance(tree, dict):
        return {tuple(map(ord, key)): plain(child) for key, child in tree.items()}
    return tree.tolist() if isinstance(tree, torch.Tensor) else tree


def back(pipeline, state: dict[str, Any], twin: dict[str, Any]) -> None:
    line = pipeline(state)
    receipt = line.save()
    text = receipt.layout.header[8:]
    json.loads(text, object_pairs_hook=no_name_twice).keys()
    assert all(chunk.name.encode() for chunk in receipt.layout.chunks)
    line.load_into(twin)


def no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    assert not twice
    return dict(pairs)


@quick
@given(st.dictionaries(names, trees, min_size=1, max_size=4), inner_names)
@example({"a.b": None, "a": {"b": None}}, "v")
@example({"a.b": torch.float32, "a": {"b": torch.float32}, "a.b~": torch.float32}, "v")
@example({"\ud83d\ude00": torch.float32, "\U0001f600": torch.float32}, "v")
@example({"$tensor": torch.float32, "$value": None}, "$tensor")
def test_keys_of_dictionaries(pipeline, tree, entry):
    live, twin = rekindle.Values(), rekindle.Values()
    live.load_state_dict({"x": filled(tree, [0])})
    back(pipeline, {entry: live}, {entry: twin})
    assert plain(twin.state_dict()) == plain(live.state_dict())


def module(tree: Any, count: list[int]) -> nn.Module:
    made = nn.Module()
    for name, child in tree.items():
        count[0] += 1
        if hasattr(made, name) or name == "_extra_state":
            continue
        if isinstance(child, dict):
            made.add_module(name, module(child, count))
        elif child is None:
            made.register_buffer(name, torch.tensor([float(count[0])]))
        else:
            made.register_parameter(name, nn.Parameter(torch.tensor([float(count[0])])))
    return made


modules = st.recursive(
    st.sampled_from([torch.float32, None]),
    lambda inner: st.dictionaries(inner_names, inner, min_size=1, max_size=4),
    max_leaves=8,
)


@quick
@given(st.dictionaries(inner_names, modules, min_size=1, max_size=4))
@example({"_orig_mod": {"weight": torch.float32}, "weight": torch.float32})
@example({"a": {"_orig_mod": {"weight": torch.float32}, "weight": torch.float32}})
@example({"my_orig_mod": {"weight": torch.float32}, "my": {"weight": torch.float32}, "myweight": torch.float32})
@example({"\ud83d\ude00": torch.float32, "\U0001f600": torch.float32})
def test_names_in_modules(pipeline, tree):
    def state(seed: int) -> dict[str, Any]:
        made = module(tree, [seed])
        parameters = [*made.parameters(), nn.Parameter(torch.ones(1))]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        for p in parameters:
            p.grad = p.detach() + seed
        optimizer.step()
        return {"$tensor": made, "optimizer": optimizer}

    live, twin = state(0), state(1000)
    back(pipeline, live, twin)
    for name in live:
        before, after = live[name].state_dict(), twin[name].state_dict()
        assert repr(before) == repr(after)


def test_the_name_of_a_wrapped_part_is_not_the_end_of_another_name():
    model = nn.ModuleDict({"my_orig_mod": nn.Linear(1, 1)})
    plan, _ = Capture({"m": model}, rng=False).prepare()
    assert {chunk.name for chunk in plan.layout.chunks} == {"m.my_orig_mod.weight", "m.my_orig_mod.bias"}


def test_a_module_with_a_part_called_as_those_of_compiled_ones_is_saved_whole(pipeline):
    live, twin = nn.Linear(2, 2), nn.Linear(2, 2)
    for each in (live, twin):
        each._orig_mod = nn.Linear(2, 2)
    line = pipeline({"m": live})
    line.save()
    line.load_into({"m": twin})
    for key, value in live.state_dict().items():
        assert torch.equal(twin.state_dict()[key], value), key


@pytest.mark.parametrize("name", ["a#1", "a#0~", "__metadata__"])
def test_the_header_of_a_shard_has_each_name_once(name):
    boxes = [Chunk("a", "float32", (4,), (at,), (2,)) for at in (0, 2)]
    layout = Layout.build([*boxes, Chunk("a#0", "float32", (1,), (0,), (1,)), Chunk(name, "uint8", (1,), (0,), (1,))])
    table = json.loads(layout.header[8:], object_pairs_hook=no_name_twice)
    ranges = [tuple(entry["data_offsets"]) for key, entry in table.items() if key != "__metadata__"]
    assert sorted(ranges) == [(chunk.start, chunk.stop) for chunk in layout.chunks]
    assert table["__metadata__"]["format"] == "pt"
