"""Values of Python's own types beyond JSON, and of classes that somebody has defined: typed, and read without code."""

from __future__ import annotations

import collections
import datetime
import enum
import json
import pathlib
import sys
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rekindle
from rekindle.errors import FormatError, UnsupportedValueError, UsageError
from rekindle.state.codec import decode, encode
from tests.state.test_codec import hashable, round_trip, same, text


def parts(value: Any) -> Any:
    """What ``same`` compares: it knows not-a-number, and doesn't look into these."""
    if isinstance(value, (list, collections.deque)):
        return [type(value).__name__, getattr(value, "maxlen", None), *map(parts, value)]
    if isinstance(value, complex):
        return value.real, value.imag
    if isinstance(value, collections.defaultdict):
        return value.default_factory, dict(value)
    return value


class Mode(enum.Enum):
    FAST = 1
    SLOW = "slow"


class Level(enum.IntEnum):
    LOW = 1


class Flags(enum.Flag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: Any
    y: Any = 0


Pair = collections.namedtuple("Pair", "left right")
minutes = st.integers(-1439, 1439)
zones = st.none() | minutes.map(lambda count: datetime.timezone(datetime.timedelta(minutes=count)))
numbers = st.integers() | st.none()
types = st.one_of(
    st.complex_numbers(),
    st.builds(range, st.integers(), st.integers(), st.integers(min_value=1)),
    st.builds(slice, numbers, numbers, numbers),
    st.binary().map(bytearray),
    text.filter(lambda t: "\0" not in t).map(pathlib.Path),
    text.filter(lambda t: "\0" not in t).map(pathlib.PureWindowsPath),
    st.dates() | st.timedeltas(),
    (st.times(timezones=zones) | st.datetimes(timezones=zones)).filter(lambda moment: not moment.fold),
    st.builds(collections.deque, st.lists(hashable), st.none() | st.integers(0, 5)),
    st.builds(collections.defaultdict, st.sampled_from([None, int, list, dict]), st.dictionaries(hashable, hashable)),
    st.sampled_from([torch.strided, torch.sparse_coo, torch.channels_last, torch.preserve_format]),
)


@settings(max_examples=60, deadline=None)
@given(st.recursive(types, lambda inner: st.lists(inner) | st.builds(collections.deque, st.lists(inner)), max_leaves=5))
def test_values_come_back_with_value_and_type(value):
    back = round_trip(value)
    assert same(parts(back), parts(value))


CLASSES = {
    "enum": Mode.FAST,
    "number": Level.LOW,
    "tuple": Point(1, (2.5, Mode.SLOW)),
    "pair": Pair("a", collections.deque([Level.LOW])),
}


def values(**found: Any) -> rekindle.Values:
    return rekindle.Values(**found)


@pytest.mark.parametrize("name", CLASSES)
def test_values_of_classes_that_the_live_state_has(pipeline, name):
    value = CLASSES[name]
    line = pipeline({"v": values(x=value)})
    line.save()
    live = values(other=[Mode.SLOW, {"a": (Level.LOW, Point(0), Pair(0, 0))}])
    line.load_into({"v": live})
    assert live.x == value and type(live.x) is type(value)


@pytest.mark.parametrize("name", CLASSES)
def test_values_of_classes_that_it_has_not_are_refused_by_path_and_nothing_is_imported(pipeline, name, monkeypatch):
    line = pipeline({"v": values(deep=[CLASSES[name]])})
    line.save()
    monkeypatch.delitem(sys.modules, __name__)
    live = values(kept=1)
    with pytest.raises(UsageError, match=r"v\.deep\[0\]: is of the class tests\.state\.test_types\.\w+.*allow_pickle"):
        line.load_into({"v": live})
    assert live.state_dict() == {"kept": 1} and __name__ not in sys.modules


def test_allow_pickle_imports_them(pipeline):
    line = pipeline({"v": values(**CLASSES)})
    line.save()
    live = values()
    line.load_into({"v": live}, allow_pickle=True)
    assert live.state_dict() == CLASSES


def test_a_class_is_known_by_its_name_and_is_what_it_was():
    form = json.loads(json.dumps(encode(Point(1, 2))))
    name = "tests.state.test_types:Point"
    assert decode(form, classes={name: Point}) == (1, 2)
    other = collections.namedtuple("Point", "y x")
    for kind, told in (
        (other, "has the fields"),
        (Mode, "not a class of namedtuple"),
        (dict, "not a class of namedtuple"),
    ):
        with pytest.raises(FormatError, match=told):
            decode(form, classes={name: kind})
    with pytest.raises(FormatError, match="FAST"):
        decode(encode(Mode.FAST), classes={"tests.state.test_types:Mode": enum.Enum("Mode", "OTHER")})


def test_what_is_not_at_hand_goes_through_as_it_is():
    for value in CLASSES.values():
        form = encode([value])
        assert encode(decode(form)) == form


class Zone(datetime.tzinfo):
    def utcoffset(self, moment):
        return datetime.timedelta(0)

    def dst(self, moment):
        return None


REFUSED = {
    "flags": Flags.A | Flags.B,
    "time zone": datetime.datetime(2026, 1, 1, tzinfo=Zone()),
    "fold": datetime.datetime(2026, 1, 1, fold=1),
    "factory": collections.defaultdict(lambda: 1),
    "tensor": collections.deque([torch.ones(1)]),
    "in a tuple": Point(torch.ones(1)),
    "in a set": {torch.ones(1)},
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_what_has_no_form_is_refused_by_path(pipeline, value):
    with pytest.raises(UnsupportedValueError, match=r"^v\.x: .*(allow_pickle|lists, tuples and dictionaries)"):
        pipeline({"v": values(x=value)}).save()


def test_keys_of_such_classes_are_refused_by_path(pipeline):
    with pytest.raises(UnsupportedValueError, match=r"v\.x: a key of the dictionary: .*use its value or name"):
        pipeline({"v": values(x={Mode.FAST: 1})}).save()


@pytest.mark.parametrize(
    "form",
    [
        {"$path": ["Path", "x"]},
        {"$defaultdict": ["eval"]},
        {"$layout": "nn"},
        {"$range": [1, 2, 0]},
        {"$date": "x"},
        {"$deque": [-1]},
        {"$complex": [1, 2, 3]},
        {"$enum": []},
        {"$enum": 3},
        {"$timedelta": [1 << 62]},
    ],
    ids=json.dumps,
)
def test_forms_that_are_none_are_refused(form):
    with pytest.raises(FormatError):
        decode(form, classes={})
