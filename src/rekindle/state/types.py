"""Encodes values of types beyond those of JSON, NumPy and torch, in forms that decode without running code."""

from __future__ import annotations

import base64
import datetime
import enum
import importlib
import json
import pathlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from rekindle.errors import FormatError, UsageError

__all__ = [
    "DECODERS",
    "CLASS_TAGS",
    "Recurse",
    "ForeignValue",
    "class_names_in",
    "classes_of",
    "encode_other",
    "decode_of_class",
]

Recurse = Callable[[Any], Any]
"""Encodes or decodes an inner value."""

CLASS_TAGS = ("$enum", "$namedtuple")
"""Tags of values of a user's class, which loading doesn't import."""

_PATHS = {kind.__name__: kind for kind in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)}
_MOMENTS = {kind.__name__: kind for kind in (datetime.date, datetime.time, datetime.datetime)}
_FACTORIES = {kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)}
_TORCH = {"$layout": torch.layout, "$memory_format": torch.memory_format}


class ForeignValue:
    """Carries a value of an unknown class, in encoded form, from one file to another."""

    def __init__(self, form: dict[str, Any]) -> None:
        self.form = form

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ForeignValue) and self.form == other.form

    def __hash__(self) -> int:
        return hash(json.dumps(self.form))


def encode_other(value: Any, again: Recurse) -> Any:
    """Returns the JSON for a value, an object of one key; None for a type without a form.

    ``again`` encodes inner values.
    """
    kind = type(value)
    if kind is complex:
        return {"$complex": [again(value.real), again(value.imag)]}
    if kind is range:
        return {"$range": [again(value.start), again(value.stop), again(value.step)]}
    if kind is slice:
        return {"$slice": [again(value.start), again(value.stop), again(value.step)]}
    if kind is bytearray:
        return {"$bytearray": base64.b64encode(value).decode()}
    if kind in _PATHS.values():
        return {"$path": [kind.__name__, again(str(value))]}
    if kind is datetime.timedelta:
        return {"$timedelta": [value.days, value.seconds, value.microseconds]}
    if kind in _MOMENTS.values():
        text = value.isoformat()
        whole = repr(kind.fromisoformat(text)) == repr(value)  # else a time zone of a user's class
        return {f"${kind.__name__}": text} if whole else None
    if kind is deque:
        return {"$deque": [value.maxlen, *map(again, value)]}
    if kind is defaultdict:
        return _defaultdict(value, again)
    for tag, torchs in _TORCH.items():
        if kind is torchs:
            return {tag: str(value).removeprefix("torch.")}
    return value.form if kind is ForeignValue else _of_class(value, again)


def _defaultdict(value: defaultdict[Any, Any], again: Recurse) -> Any:
    factory = value.default_factory
    if factory is not None and factory not in _FACTORIES.values():
        return None
    name = factory.__name__ if isinstance(factory, type) else None
    return {"$defaultdict": [name, *([again(key), again(item)] for key, item in value.items())]}


def _of_class(value: Any, again: Recurse) -> Any:
    kind = type(value)
    if isinstance(value, enum.Enum) and kind.__members__.get(str(value.name)) is value:
        return {"$enum": [_name(kind), value.name]}
    if _is_namedtuple(kind):
        return {"$namedtuple": [_name(kind), list(kind._fields), *map(again, value)]}
    return None


def _is_namedtuple(kind: Any) -> bool:
    return kind.__bases__ == (tuple,) and isinstance(getattr(kind, "_fields", None), tuple)


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


# -- and back --------------------------------------------------------------------------------------------------------


def _of_torch(kind: type) -> Callable[[Any, Recurse], Any]:
    def find(body: Any, _: Recurse) -> Any:
        found = vars(torch).get(body)
        if type(found) is not kind:
            raise ValueError(f"torch.{body} is not a {kind.__name__}")
        return found

    return find


DECODERS: dict[str, Callable[[Any, Recurse], Any]] = {
    "$complex": lambda body, again: complex(*map(again, body)),
    "$range": lambda body, again: range(*map(again, body)),
    "$slice": lambda body, again: slice(*map(again, body)),
    "$bytearray": lambda body, _: bytearray(base64.b64decode(body)),
    "$path": lambda body, again: _PATHS[body[0]](again(body[1])),
    "$timedelta": lambda body, _: datetime.timedelta(*body),
    "$date": lambda body, _: datetime.date.fromisoformat(body),
    "$time": lambda body, _: datetime.time.fromisoformat(body),
    "$datetime": lambda body, _: datetime.datetime.fromisoformat(body),
    "$deque": lambda body, again: deque(map(again, body[1:]), body[0]),
    "$defaultdict": lambda body, again: defaultdict(
        None if body[0] is None else _FACTORIES[body[0]], {again(key): again(item) for key, item in body[1:]}
    ),
    **{tag: _of_torch(kind) for tag, kind in _TORCH.items()},
}


def decode_of_class(tag: str, body: Any, again: Recurse, classes: Mapping[str, type], *, may_import: bool) -> Any:
    """Returns a value of one of these ``classes``. Runs no code of the class beyond that of ``enum`` and ``tuple``.

    Raises UsageError for another class, unless it may be imported, and FormatError for a value that doesn't fit its
    class.
    """
    name, *rest = body
    kind: Any = classes.get(name)
    if kind is None:
        if not may_import:
            raise UsageError(f"a value is of {name!r:.200}, a class that loading doesn't import")
        try:
            kind = _imported(name)
        except (ImportError, AttributeError) as error:
            raise UsageError(f"a value is of {name!r:.200}, a class that can't be imported: {error}") from error
    if tag == "$enum" and issubclass(kind, enum.Enum):
        return kind.__members__[rest[0]]
    if tag == "$namedtuple" and _is_namedtuple(kind):
        if list(kind._fields) != rest[0]:
            raise FormatError(f"{name} has the fields {list(kind._fields)}, and had {rest[0]}")
        return tuple.__new__(kind, map(again, rest[1:]))
    raise FormatError(f"{name} is not a class of {tag[1:]} values")


def _imported(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def class_names_in(form: Any) -> Iterator[str]:
    """Yields the names of the classes in typed JSON."""
    if isinstance(form, dict):
        for tag in CLASS_TAGS:
            if isinstance(body := form.get(tag), list) and body:
                yield str(body[0])
    for child in form if isinstance(form, list) else form.values() if isinstance(form, dict) else ():
        yield from class_names_in(child)


def classes_of(values: Iterable[Any]) -> dict[str, type]:
    """Maps names to the classes of all enum members and namedtuples in nested live values."""
    found: dict[str, type] = {}
    for value in values:
        kind = type(value)
        if isinstance(value, enum.Enum) or _is_namedtuple(kind):
            found[_name(kind)] = kind
        if isinstance(value, Mapping):
            found |= classes_of(value.keys()) | classes_of(value.values())
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            found |= classes_of(value)
    return found
