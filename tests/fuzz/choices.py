"""From a fuzzer's bytes to bad input, by way of edits of something valid. Edits can be read, kept and replayed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, TypeVar

__all__ = ["Case", "Choices", "apply", "edits", "text"]

T = TypeVar("T")
Case = dict[str, Any]
"""What is done to a valid thing: JSON, so that it can be kept as a file and read by a person."""

_ROOM = 300_000
"""What a document may grow by, about: it is to stay a small one."""
_GROWS = re.compile(rb'"@(nest|objects|list|big|inf|-inf|nan|text)(?::(\d+))?"')
"""Texts that stand for what would be too long to write down; ``text`` puts it in their place."""

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, -1, -(10**18), 1 << 31, 1 << 53, 1 << 62, 1 << 63, 10**18, 10**30, 0.5, 1e300),
    *("@inf", "@-inf", "@nan", "@big:4000", "@big:100000", "@nest:95", "@nest:350", "@nest:100000", "@objects:300"),
    *("@objects:100000", "@list:100000", "@text:100000", "@nest:3", [], {}, [[]], [{}], [0], [1, 1], "", "a", "7"),
    *("..", "../outside/secret", "/etc/passwd", "a/b", "\0", "\ud800", "é", "x" * 300, "[/b]", "\x1b[31m", "$tensor"),
    *("float32", "float64", "complex64", "uint8", "bool", "float8_e8m0fnu", "U8", "F32", "I64", "<i4", "O", "i4,i4"),
    *({"$value": 0}, {"$value": 1 << 40}, {"$value": -1}, {"$tensor": "nobody"}, {"$tensor": 5}, {"$tuple": 5}),
    *({"$dict": [[{"$set": []}, {"$value": 0}]]}, {"$dict": [["a", [0]]]}, {"$dict": 3}, {"$list": []}, {"$new": 1}),
    *({"$ordered": [["a", {"$value": 0}], ["a", {"$value": 0}]]}, {"$tuple": [{"$value": 0}]}, {"$bytes": "!"}),
    *({"$int": "0xfffffffffffffffffffffffff"}, {"$size": [1 << 70]}, {"$dtype": "ops"}, {"$dtype": "_dynamo"}),
    *({"$array": ["<i4", [1 << 62, 0], ""]}, {"$array": ["V99999999999", [1], "AAAA"]}, {"$scalar": ["S0", ""]}),
    *({"$device": "cuda:99"}, {"$float": "nan"}, {"$str": "7aCA"}, {"$set": [[1]]}, {"$frozenset": [{"$tuple": []}]}),
    # os.mkdir("ran") as a pickle: the hook sees it, should it ever be loaded.
    {"$pickle": "Y29zCm1rZGlyCihWcmFuCnRSLg=="},
)


class Choices:
    """Decisions out of bytes. Where they end, every decision is the first one."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return max(0, len(self._data) - self._at)

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def number(self, below: int) -> int:
        value = 0
        for _ in range((max(below, 2) - 1).bit_length() + 7 >> 3):
            value = value << 8 | self.byte()
        return value % max(below, 1)

    def pick(self, things: Sequence[T]) -> T:
        return things[(self.byte() if len(things) <= 256 else self.byte() << 8 | self.byte()) % len(things)]

    def rest(self, most: int = 1 << 20) -> bytes:
        found = self._data[self._at : self._at + most]
        self._at += len(found)
        return found

    def value(self, like: Any) -> Any:
        """Something in the place of ``like``."""
        how = self.byte() % 4
        if how == 0 and type(like) is int:
            return like + self.pick((1, -1, 2, 8, -8, 4096, 1 << 24, like, -like))
        if how == 1:
            size = 1 << self.number(64)
            return self.pick((size, size - 1, -size, self.number(1 << 16)))
        if how == 2 and type(like) is str:
            return like[: self.byte()] + self.rest(self.byte() % 8).decode("latin-1")
        if how == 2 and isinstance(like, list):
            return [
                self.pick(HOSTILE) if self.byte() % 8 == 0 else self.number(1 << 16) for _ in range(self.byte() % 5)
            ]
        return json.loads(json.dumps(self.pick(HOSTILE)))  # edits that follow may change it


def edits(fields: Any, choices: Choices, most: int = 6) -> list[list[Any]]:
    """Some changes of ``fields``, which is left as it is after them."""
    found = []
    while choices.left and len(found) < most:
        path: list[Any] = []
        node = fields
        while isinstance(node, (dict, list)) and node and (not path or choices.byte() % 8):
            key = choices.pick(list(node)) if isinstance(node, dict) else choices.number(len(node))
            path.append(key)
            node = node[key]
        how = choices.pick(("set", "set", "set", "drop", "copy", "repeat", "key"))
        if how == "copy":
            what: Any = _somewhere(fields, choices)
        elif how == "repeat":
            what = choices.pick((2, 3, 50, 2000))
        elif how == "key":
            what = choices.pick(("$tensor", "$value", "$tuple", "$dict", "", "x", "@text:5000", "\ud800", "[/x]"))
        else:
            what = choices.value(node) if how == "set" else None
        edit = [how, path, what]
        found.append(edit)
        apply(fields, [edit])
    return found


def _somewhere(node: Any, choices: Choices) -> Any:
    for _ in range(choices.byte() % 8):
        if not isinstance(node, (dict, list)) or not node:
            break
        node = choices.pick(list(node.values())) if isinstance(node, dict) else node[choices.number(len(node))]
    return json.loads(json.dumps(node))


def apply(fields: Any, edits: Sequence[Sequence[Any]]) -> None:
    """Do these edits. One whose place is gone does nothing."""
    for how, path, what in edits:
        node = fields
        try:
            for key in path[:-1]:
                node = node[key]
            last = path[-1]
            if how == "drop":
                del node[last]
            elif how == "repeat":
                node[last : last + 1] = [node[last]] * what
            elif how == "key":
                node[what] = node.pop(last)
            else:
                node[last]
                node[last] = what
        except (KeyError, IndexError, TypeError, AttributeError):
            continue


def text(fields: Any) -> bytes:
    """The JSON, with what was too long to write down in its place."""

    room = [_ROOM]

    def grown(match: re.Match[bytes]) -> bytes:
        what, count = match[1].decode(), int(match[2] or 0)
        room[0] -= count
        if room[0] < 0:
            return b"null"
        return {
            "nest": b"[" * count + b"]" * count,
            "objects": b'{"a":' * count + b"0" + b"}" * count,
            "list": b"[" + b"0," * count + b"0]",
            "big": b"9" * count,
            "text": b'"' + b"t" * count + b'"',
            "inf": b"1e999",
            "-inf": b"-1e999",
            "nan": b"NaN",
        }[what]

    return _GROWS.sub(grown, json.dumps(fields, separators=(",", ":")).encode())
