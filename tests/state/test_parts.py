"""Which boxes a run of a tensor's elements is."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from rekindle.state.parts import boxes_of_range


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_the_boxes_of_a_run_are_its_elements_in_order(shape: list[int], data: st.DataObject) -> None:
    count = math.prod(shape)
    first = data.draw(st.integers(0, count))
    last = data.draw(st.integers(first, count))
    tensor = torch.arange(count).view(shape)
    found = []
    for box in boxes_of_range(shape, first, last):
        part = tensor
        for dimension, (at, size) in enumerate(zip(*box, strict=True)):
            part = part.narrow(dimension, at, size)
        found += part.flatten().tolist()
    assert found == list(range(first, last))
    assert len(boxes_of_range(shape, first, last)) <= max(1, 2 * len(shape) - 1)
