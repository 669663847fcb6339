"""Whether shards make up a whole checkpoint: every tensor that one of them speaks of is there, all of it."""

from __future__ import annotations

from typing import Any

from rekindle.format.boxes import Box, uncovered
from rekindle.format.completeness import find_defect
from rekindle.format.layout import Chunk, Layout
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.receipt import Receipt


def receipt(rank: int, chunks: list[Chunk], structure: Any) -> Receipt:
    layout = Layout.build(chunks)
    stamp = ShardId(1, rank, 2, Incarnation(1, "a" * 16))
    raw = Receipt.encode(stamp, Receipt.static_part(layout, structure), ["0" * 16] * len(layout.blocks), b"[]")
    return Receipt.decode(raw, "receipt")


def rows(name: str, first: int, last: int, whole: int = 6, dtype: str = "float32", own: bool = False) -> Chunk:
    return Chunk(name, dtype, (whole, 2), (first, 0), (last - first, 2), own=own)


SPEAKS = {"model": {"w": {"$tensor": "model.w"}, "list": [{"$tuple": [{"$tensor": "model.b"}]}]}}


def test_a_whole_that_is_cut_up() -> None:
    first = receipt(0, [rows("model.w", 0, 4), rows("model.b", 0, 6)], SPEAKS)
    assert find_defect([first, receipt(1, [rows("model.w", 4, 6)], SPEAKS)]) is None
    assert find_defect([first, receipt(1, [rows("model.w", 2, 6)], SPEAKS)]) is None, "what is there twice is there"


def test_a_part_that_nobody_has_is_named() -> None:
    first = receipt(0, [rows("model.w", 0, 3), rows("model.b", 0, 6)], SPEAKS)
    found = find_defect([first, receipt(1, [rows("model.w", 4, 6)], SPEAKS)])
    assert found == "model.w[3:4, 0:2] is in no shard"


def test_a_tensor_that_nobody_has_is_named() -> None:
    found = find_defect([receipt(0, [rows("model.w", 0, 6)], {}), receipt(1, [], SPEAKS)])
    assert found == "model.b, which rank 1 names, is in no shard"


def test_ranks_that_speak_of_different_tensors_by_one_name() -> None:
    first = receipt(0, [rows("model.w", 0, 6)], {})
    assert "float32[6, 2]" in (find_defect([first, receipt(1, [rows("model.w", 0, 6, dtype="float64")], {})]) or "")
    assert "[8, 2]" in (find_defect([first, receipt(1, [rows("model.w", 6, 8, 8)], {})]) or "")
    own = [receipt(n, [rows("model.w", 0, 6 + n, 6 + n, own=True)], {}) for n in range(2)]
    assert find_defect(own) is None, "each has its own"


def test_what_is_not_covered() -> None:
    whole = Box((0, 0), (4, 4))
    assert uncovered(whole, [Box((0, 0), (4, 2)), Box((0, 2), (4, 2))]) == []
    assert sum(box.volume for box in uncovered(whole, [Box((1, 1), (2, 2))])) == 12
    assert uncovered(Box((), ()), []) == [Box((), ())]
    assert uncovered(Box((0,), (0,)), []) == []
