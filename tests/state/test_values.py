"""Plain values: attributes, items and a dictionary's methods of one and the same thing."""

from __future__ import annotations

import copy
import pickle

import pytest

import rekindle


def test_values_are_a_mapping(pipeline) -> None:
    values = rekindle.Values(epoch=0, best=2.5)
    values["val/loss"] = 0.3
    values["epoch"] += 1
    values.update(best=1.5, seen=[1, 2])
    assert (values.epoch, values["best"], values.get("val/loss"), values.get("none", 7)) == (1, 1.5, 0.3, 7)
    assert "seen" in values and "other" not in values
    assert list(values) == ["epoch", "best", "val/loss", "seen"] and len(values) == 4
    assert dict(values) == {**values} == values.state_dict()
    del values["seen"]
    assert values.pop("best") == 1.5 and list(values.items()) == [("epoch", 1), ("val/loss", 0.3)]
    with pytest.raises(KeyError, match="seen"):
        values["seen"]
    with pytest.raises(AttributeError, match="no value 'seen'"):
        _ = values.seen
    with pytest.raises(TypeError, match="3"):
        values[3] = "three"  # type: ignore[index]
    line = pipeline({"values": values})
    line.save()
    fresh = rekindle.Values()
    line.load_into({"values": fresh})
    assert dict(fresh) == dict(values)


def test_values_named_like_methods_are_values() -> None:
    values = rekindle.Values(self=1, items=[2], update=3)
    values["keys"] = 4
    assert values.items == [2] and values.update == 3 and values["keys"] == 4
    assert values.state_dict() == {"self": 1, "items": [2], "update": 3, "keys": 4}
    assert len(values) == 4 and "update" in values


def test_values_are_compared_and_copied_as_before() -> None:
    values = rekindle.Values(a=1)
    assert values != rekindle.Values(a=1) and values in {values}
    assert dict(copy.deepcopy(values)) == dict(pickle.loads(pickle.dumps(values))) == {"a": 1}
