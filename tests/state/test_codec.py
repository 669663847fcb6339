"""Values as typed JSON: the same value, of the same type, and no code runs."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import rekindle
from rekindle.errors import FormatError, UnsupportedValueError, UsageError
from rekindle.format.fields import check_values
from rekindle.state.codec import decode, encode


def round_trip(value: Any, **allow: bool) -> Any:
    return decode(json.loads(json.dumps(encode(value, **allow), allow_nan=False)), **allow)


def same(a: Any, b: Any) -> bool:
    """Equal in value and exact type, all the way down; -0.0 is not 0.0, nan is nan."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and type(a) is float:
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, (numpy.ndarray, numpy.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(*pair) for pair in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    return a == b


text = st.text(st.characters())  # lone surrogates among them
hashable = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text | st.binary(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
dtypes = st.sampled_from([v for v in vars(torch).values() if isinstance(v, torch.dtype)])
devices = st.sampled_from(["cpu", "cuda", "cuda:3", "meta", "mps"]).map(torch.device)
sizes = st.lists(st.integers(0, 1 << 40), max_size=4).map(torch.Size)
leaves = hashable | dtypes | devices | sizes
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.sets(hashable, max_size=4)
        | st.frozensets(hashable, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4)
    ),
    max_leaves=20,
)


@given(values)
@example([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 5e-324, 1.7976931348623157e308])
@example([1 << 53, -(1 << 53), (1 << 53) - 1, 1 << 64, -(1 << 200), True, 1, False, 0])
@example({1: "int", "1": "str", (1,): "tuple", None: "none", 1.5: "float", b"1": "bytes"})
@example({"$int": "7"})
@example([{"$tensor": "x"}, {"$value": 3}, {"$pickle": "x"}])
@example(["\ud800", "\udfff x", "\x00", "é", "\U0001f600", "\u2028", ""])
@example([[], (), {}, set(), frozenset(), b"", ((),), [{}]])
def test_values_come_back_with_value_and_type(value):
    assert same(round_trip(value), value)


@pytest.mark.parametrize(
    "value", ["\ud83d\ude00", "a\ud83d\ude00b", {"\ud83d\ude00": 1}], ids=["alone", "inside", "key"]
)
def test_two_surrogates_that_would_make_a_pair_stay_two(value):
    assert same(round_trip(value), value)


@pytest.mark.parametrize("value", [1 << 20_000, -(10**5000), 10**4299], ids=["2**20000", "-10**5000", "10**4299"])
def test_integers_of_any_length(value):
    assert same(round_trip(value), value)


numpy_dtypes = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(endianness="?"),
    hnp.byte_string_dtypes(min_len=1),
    hnp.unicode_string_dtypes(min_len=1),
    hnp.datetime64_dtypes(endianness="?"),
    hnp.timedelta64_dtypes(endianness="?"),
)


@given(hnp.arrays(numpy_dtypes, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)))
def test_arrays_come_back_bit_for_bit(array):
    back = round_trip(array)
    assert same(back, array)
    assert back.flags.writeable and back.flags.owndata


@given(hnp.arrays(hnp.scalar_dtypes(), 1))
def test_numpy_scalars_come_back_as_scalars(array):
    scalar = array[0]
    if not isinstance(scalar, (numpy.str_, numpy.bytes_)) or len(scalar):
        assert same(round_trip(scalar), scalar)


@pytest.mark.parametrize("value", [numpy.str_(""), numpy.bytes_(b"")], ids=["str", "bytes"])
def test_empty_numpy_strings(value):
    assert same(round_trip(value), value)


@pytest.mark.parametrize(
    "array",
    [
        numpy.arange(12).reshape(3, 4).T,
        numpy.arange(12)[::-2],
        numpy.asfortranarray(numpy.ones((2, 3))),
        numpy.broadcast_to(numpy.float32(3), (2, 2)),
    ],
)
def test_arrays_that_are_not_contiguous(array):
    assert numpy.array_equal(round_trip(array), array) and round_trip(array).dtype == array.dtype


class Foreign:
    """Something that the format has no type for."""

    def __init__(self, x: int = 5) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Foreign) and other.x == self.x

    __hash__ = None


class MyInt(int):
    pass


class MyStr(str):
    pass


unsupported = pytest.mark.parametrize(
    "value",
    [
        Foreign(),
        object(),
        print,
        int,
        MyInt(3),
        MyStr("x"),
        numpy.array([object()]),
        numpy.zeros(2, dtype=[("a", "i4")]),
        numpy.ma.masked_array([1], [True]),
        [1, {"x": (2, Foreign())}],
        {Foreign},
    ],
    ids=lambda value: type(value).__name__,
)


@unsupported
def test_what_the_format_has_no_type_for_is_refused(value):
    with pytest.raises(UnsupportedValueError, match="allow_pickle"):
        encode(value)
    with pytest.raises(TypeError):
        encode(value)


@pytest.mark.parametrize("kind", [list, tuple, frozenset, lambda pair: {"a": next(iter(pair))}])
def test_values_are_refused_before_they_are_too_deep_to_be_read(kind):
    value: Any = 1
    with pytest.raises(UnsupportedValueError, match="too deeply"):
        for _ in range(1000):
            assert decode(check_values([encode(value)])[0]) == value
            value = kind([value])


def test_a_pickle_is_written_and_read_only_when_asked_for():
    value = {"a": [Foreign(7)]}
    encoded = json.loads(json.dumps(encode(value, allow_pickle=True)))
    assert decode(encoded, allow_pickle=True) == value
    with pytest.raises(UsageError, match="allow_pickle=True"):
        decode(encoded)
    with pytest.raises(UsageError):
        decode({"$tuple": [1, {"$set": [encoded]}]})


class Bomb:
    exploded = False

    def __reduce__(self) -> Any:
        return (setattr, (Bomb, "exploded", True))


def test_reading_runs_no_code():
    encoded = json.loads(json.dumps(encode([Bomb()], allow_pickle=True)))
    with pytest.raises(UsageError):
        decode(encoded)
    assert not Bomb.exploded


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"a": 1},
        {"$int": "1", "$float": "2"},
        {"$unknown": 1},
        {"$int": "x"},
        {"$int": None},
        {"$bytes": 5},
        {"$dtype": "float33"},
        {"$dtype": "nn"},
        {"$device": "no such device"},
        {"$array": ["<f4", [2], "AAAA"]},
        {"$array": ["O", [1], "AAAAAAAAAAA="]},
        {"$scalar": 3},
        {"$dict": [[1]]},
        {"$set": [[1]]},
        {"$size": ["x"]},
    ],
    ids=json.dumps,
)
def test_what_encode_never_wrote_is_a_format_error(value):
    with pytest.raises((FormatError, UsageError)):
        decode(value)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"foo": Foreign()}, "v.foo"),
        ({"a": {"b": [1, (2, Foreign())]}}, "v.a.b[1][1]"),
        ({"a": {3: {"x": Foreign()}}}, "v.a[3].x"),
        ({"a": {"s": {1, MyInt(2)}}}, "v.a.s"),
        ({"a": {Foreign: 1}}, "v.a"),
    ],
)
def test_a_refusal_names_the_path_in_the_state(pipeline, value, path):
    with pytest.raises(UnsupportedValueError) as caught:
        pipeline({"v": rekindle.Values(**value)}).save()
    assert str(caught.value).startswith(f"{path}: ")


def test_a_refusal_names_the_path_in_an_optimizer(pipeline):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.param_groups[0]["foo"] = Foreign()
    with pytest.raises(UnsupportedValueError, match=r"^optimizer\.param_groups\[0\]\.foo: .*Foreign"):
        pipeline({"optimizer": optimizer}).save()


def test_a_refusal_of_a_value_that_came_later_names_it_too(pipeline):
    values = rekindle.Values(a=1, b=[1, 2])
    line = pipeline({"v": values})
    line.save()
    values.b[1] = Foreign()
    with pytest.raises(UnsupportedValueError, match=r"^v\.b\[1\]: "):
        line.save()


def test_pickled_values_in_a_state_need_a_word_at_both_ends(pipeline):
    line = pipeline({"v": rekindle.Values(a=Foreign(9), b=2)}, allow_pickle=True)
    line.save()
    back = rekindle.Values()
    with pytest.raises(UsageError, match="allow_pickle=True"):
        line.load_into({"v": back})
    line.load_into({"v": back}, allow_pickle=True)
    assert back.a == Foreign(9) and back.b == 2


def test_a_pickle_that_is_not_allowed_changes_nothing(pipeline):
    torch.manual_seed(0)
    saved = {"model": torch.nn.Linear(2, 2), "v": rekindle.Values(a=Foreign())}
    line = pipeline(saved, allow_pickle=True)
    line.save()
    live = {"model": torch.nn.Linear(2, 2), "v": rekindle.Values(a=0)}
    before = live["model"].weight.detach().clone()
    with pytest.raises(UsageError):
        line.load_into(live)
    assert torch.equal(live["model"].weight, before) and live["v"].a == 0


@given(st.dictionaries(st.text(min_size=1), values, max_size=4))
def test_a_state_of_values_goes_through_a_receipt(value):
    from tests.pipeline import Pipeline

    line = Pipeline({"v": rekindle.Values(content=value)})
    line.save()
    back = rekindle.Values()
    line.load_into({"v": back})
    line.writer.close()
    assert same(back.content, value)
