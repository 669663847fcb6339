"""Checks the fields of documents. A digest shows that bytes are as they were written, not that they make sense.

Each check returns the value that it was given. For a value that no writer of the format would have written it raises
ValueError, and nothing else.
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
"""Largest integer in a document: the limit of a signed 64-bit integer."""

_MAX_DEPTH = 128
"""Levels of nesting in a structure. Writers stop at 100. Readers walk through it by recursion."""
MAX_VALUE_DEPTH = 250
"""Levels of JSON nesting in a value."""
_MAX_SECONDS = 1e11
"""Three thousand years. Calendars go no further."""
_MAPPINGS = ("$dict", "$ordered", "$counter")


def loads(data: bytes | str) -> Any:
    """Parses JSON. Raises ValueError for anything else, also for JSON that is nested too deeply for the parser."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_integer(value: Any, least: int = 0, most: int = MAX_INTEGER) -> int:
    """Returns an integer within these limits. A boolean, or text that looks like a number, is refused."""
    if type(value) is not int:
        raise ValueError(f"found a {type(value).__name__} where an integer is expected")
    if not least <= value <= most:
        raise ValueError(f"{value} is not between {least} and {most}")
    return value


def check_integers(value: Any, count: int = 1 << 20, most: int = MAX_INTEGER) -> tuple[int, ...]:
    """Returns, as a tuple, a list of at most ``count`` integers from 0 to ``most``."""
    if type(value) is not list or len(value) > count or not set(map(type, value)) <= {int}:
        raise ValueError(f"expected a list of at most {count} integers")
    if value:
        check_integer(min(value))
        check_integer(max(value), 0, most)
    return tuple(value)


def check_seconds(value: Any) -> float:
    """Returns a time or a duration in seconds."""
    if type(value) not in (int, float) or not -_MAX_SECONDS < value < _MAX_SECONDS:
        raise ValueError("expected a number of seconds")
    return float(value)


def check_texts(value: Any) -> list[str]:
    """Returns a list of strings."""
    if type(value) is not list or not all(type(each) is str for each in value):
        raise ValueError("expected a list of strings")
    return value


def check_structure(node: Any, values: int = MAX_INTEGER, room: int = _MAX_DEPTH) -> None:
    """Refuses anything but the structure of a state. ``values`` is the number of values that it may refer to."""
    if room < 0:
        raise ValueError("the structure is nested too deeply")
    if type(node) is dict:
        tag: str = next(iter(node), "")
        if tag.startswith("$"):
            _check_tagged(node, tag, values, room)
            return
        if any(key.startswith("$") for key in node):
            raise ValueError("the structure has a leaf with further keys beside it")
        _check_all(node.values(), values, room)
    elif type(node) is list:
        _check_all(node, values, room)
    else:
        raise ValueError(f"the structure has a {type(node).__name__} as a leaf")


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
            raise ValueError(f"the structure has other items than pairs in a {tag!r}")
        check_values([key for key, _ in body])
        _check_all((child for _, child in body), values, room)
    else:
        raise ValueError(f"the structure has an unknown {tag!r}")


def check_values(values: Any) -> list[Any]:
    """Returns a list of values, none of them nested so deeply that a reader would run out of stack."""
    if type(values) is not list:
        raise ValueError("the values are not a list")
    level, depth = values, 0
    while level := [child for each in level for child in _children(each)]:
        depth += 1
        if depth > MAX_VALUE_DEPTH:
            raise ValueError("a value is nested too deeply")
    return values


def _children(value: Any) -> Iterable[Any]:
    return value if type(value) is list else value.values() if type(value) is dict else ()
