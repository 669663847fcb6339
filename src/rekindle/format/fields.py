"""What fields of documents may hold. A digest tells that bytes are as they were written, not that they make sense.

Everything here raises ValueError, and nothing else, at what no writer of ours would have written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

__all__ = [
    "MAX_VALUE_DEPTH",
    "MAX_INTEGER",
    "check_structure",
    "check_values",
    "loads",
    "check_integer",
    "check_integers",
    "check_seconds",
    "check_texts",
]

MAX_INTEGER = (1 << 63) - 1
"""The largest number of anything: what C's own integers can hold."""

_DEEPEST = 128
"""Levels of a structure. Writers stop at 100; readers walk through it by recursion."""
MAX_VALUE_DEPTH = 250
"""Levels of JSON in a value."""
_AGES = 1e11
"""Seconds: three thousand years. Calendars go no further."""
_MAPPINGS = ("$dict", "$ordered", "$counter")


def loads(data: bytes | str) -> Any:
    """JSON, whose nesting may be too deep to be read."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_integer(value: Any, least: int = 0, most: int = MAX_INTEGER) -> int:
    """An integer, neither a truth value nor a text that looks like one."""
    if type(value) is not int:
        raise ValueError(f"a {type(value).__name__} is where a number should be")
    if not least <= value <= most:
        raise ValueError(f"{value} is not from {least} to {most}")
    return value


def check_integers(value: Any, count: int = 1 << 20, most: int = MAX_INTEGER) -> tuple[int, ...]:
    """A list of at most ``count`` numbers, none negative."""
    if type(value) is not list or len(value) > count or not set(map(type, value)) <= {int}:
        raise ValueError(f"there should be a list of at most {count} numbers")
    if value:
        check_integer(min(value))
        check_integer(max(value), 0, most)
    return tuple(value)


def check_seconds(value: Any) -> float:
    """A moment or a while."""
    if type(value) not in (int, float) or not -_AGES < value < _AGES:
        raise ValueError("that is no number of seconds")
    return float(value)


def check_texts(value: Any) -> list[str]:
    """A list of texts."""
    if type(value) is not list or not all(type(each) is str for each in value):
        raise ValueError("there should be a list of texts")
    return value


def check_structure(node: Any, values: int = MAX_INTEGER, room: int = _DEEPEST) -> None:
    """Refuse what is no structure of a state. ``values``: how many there are for it to point to, if that is known."""
    if room < 0:
        raise ValueError("the structure is nested too deeply")
    if type(node) is dict:
        tag: str = next(iter(node), "")
        if tag.startswith("$"):
            _check_tagged(node, tag, values, room)
            return
        if any(key.startswith("$") for key in node):
            raise ValueError("the structure has a leaf with keys beside it")
        _check_all(node.values(), values, room)
    elif type(node) is list:
        _check_all(node, values, room)
    else:
        raise ValueError(f"the structure has a {type(node).__name__} for a leaf")


def _check_all(nodes: Iterable[Any], values: int, room: int) -> None:
    for node in nodes:
        check_structure(node, values, room - 1)


def _check_tagged(node: dict[str, Any], tag: str, values: int, room: int) -> None:
    body = node[tag]
    if len(node) != 1:
        raise ValueError(f"the structure has keys beside {tag!r}")
    if tag == "$value":
        check_integer(body, 0, values - 1)
    elif tag == "$tensor":
        check_texts([body])
    elif tag == "$tuple" and type(body) is list:
        _check_all(body, values, room)
    elif tag in _MAPPINGS and type(body) is list:
        if not all(type(pair) is list and len(pair) == 2 for pair in body):
            raise ValueError(f"the structure has something else than pairs in a {tag!r}")
        check_values([key for key, _ in body])
        _check_all((child for _, child in body), values, room)
    else:
        raise ValueError(f"the structure has an unknown {tag!r}")


def check_values(values: Any) -> list[Any]:
    """A list of values, none of them nested so deeply that a reader would run out of stack."""
    if type(values) is not list:
        raise ValueError("the values are no list")
    level, depth = values, 0
    while level := [child for each in level for child in _children(each)]:
        depth += 1
        if depth > MAX_VALUE_DEPTH:
            raise ValueError("a value is nested too deeply")
    return values


def _children(value: Any) -> Iterable[Any]:
    return value if type(value) is list else value.values() if type(value) is dict else ()
