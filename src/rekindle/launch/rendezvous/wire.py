"""Defines what launchers tell each other: one JSON object a line, each field checked as it is read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from rekindle.format.fields import check_integer, check_texts, loads

__all__ = [
    "FIRST_ROUNDS",
    "MOST_BYTES",
    "SUCCESSORS",
    "Address",
    "Alive",
    "Bye",
    "Done",
    "Elsewhere",
    "Hello",
    "Lead",
    "Message",
    "News",
    "Refused",
    "Round",
    "Successor",
    "Want",
    "decode",
    "encode",
]

MOST_BYTES = 1 << 16
"""Bytes of a line. The longest tells of 32 launchers, with at most 0.4 kB for each."""
SUCCESSORS = 32
"""Launchers of which all know that they may lead next, in this order. The job is lost only if all are lost at once."""

FIRST_ROUNDS = 1 << 20
"""The greatest number of a job's first round."""

_MOST_NODES = 1 << 16
_LONGEST_TEXT = 1024
_HOST = re.compile(r"[\w.:%-]{1,255}", re.ASCII)
_ID = re.compile(r"[0-9a-f]{16}")
_BITS = re.compile(rf"[0-9a-f]{{1,{_MOST_NODES // 4}}}")


class Address(NamedTuple):
    """A host, by name or by number, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Successor(NamedTuple):
    """A launcher that may lead next."""

    id: str
    address: Address


class Hello(NamedTuple):
    """A launcher's first word to the one that leads, or that it asks for it."""

    job: str
    id: str
    address: Address
    """The address at which it listens itself."""
    least: int
    most: int
    """The job's numbers of nodes."""
    round: int
    """The newest round that it was part of; 0 for none."""
    place: int
    """Its place in that round; -1 for none."""
    world: int
    """The number of that round's nodes."""
    store: Address | None
    """The address of the store that it offers to the next round. None while its ranks run."""
    was_spare: bool
    """True once it has seen the job run without it."""
    done: bool
    """True once its ranks of that round have ended well."""


class Want(NamedTuple):
    """Asks for a round: the ranks have ended, or have not begun."""

    store: Address
    after: int
    """The newest round that the launcher was part of: what it says is old once it is part of a later one."""
    pause: int = 0
    """Seconds for which no round is to begin."""


class Done(NamedTuple):
    """Tells that the ranks have ended well. The launcher waits for those of the others."""

    after: int
    """The round that they were part of."""


class Alive(NamedTuple):
    """A sign of life."""


class Bye(NamedTuple):
    """A launcher's last word but signs of life."""

    over: bool
    """True if the job has ended with it."""


class News(NamedTuple):
    """Everything that a member has to know of the job now. It is told again when some of it has changed."""

    term: int
    """The number of launchers that have led, this one included."""
    round: int
    world: int
    """The newest round and the number of its nodes: a spare that leads on has to know that there was one."""
    successors: tuple[Successor, ...]
    leads_from: int
    """The place of the launcher that leads; -1 while it is a spare."""
    waiting: int
    """1 if the member's ranks are to be started again, for other nodes; else 0."""
    ending: bool
    """True while the member, whose own ranks have ended, waits for those of other nodes to do so."""
    spare: bool
    """True if the job runs without the member."""
    missing: bool
    """True while a node of the newest round, whose ranks have not ended well, is not here."""
    done: bool
    """True once the ranks of all nodes have ended well."""
    ended: frozenset[int]
    """The places whose ranks have ended well, for those that may lead next; else empty."""
    closed: bool
    """True once the job has ended."""
    over: bool
    """True once a member that has taken its leave may end: nobody needs its store any more."""


class Round(NamedTuple):
    """A round that is complete, as told to one of its members."""

    number: int
    place: int
    world: int
    store: Address

    @property
    def is_first(self) -> bool:
        """True for the job's first round."""
        return self.number <= FIRST_ROUNDS


class Elsewhere(NamedTuple):
    """An answer of a launcher that doesn't lead: the address of the one that does, if it knows that."""

    address: Address | None


class Refused(NamedTuple):
    """An answer to a launcher that is no part of this job."""

    why: str
    same_job: bool
    """True if it is of this job, but was started with other settings: no endpoint would have it."""


class Lead(NamedTuple):
    """The word of a launcher that leads to another one that may do so too. The greater claim stays."""

    job: str
    id: str
    address: Address
    round: int
    seen: int
    """The round's nodes that it sees."""
    term: int
    done: bool
    """True if the ranks of all nodes have ended well: the others have to hear of it."""

    @property
    def claim(self) -> tuple[bool, int, int, int, str]:
        return self.done, self.round, self.seen, self.term, self.id


Message = Hello | Want | Done | Alive | Bye | News | Round | Elsewhere | Refused | Lead
_KINDS: dict[str, type[Message]] = {
    "hello": Hello,
    "want": Want,
    "done": Done,
    "alive": Alive,
    "bye": Bye,
    "news": News,
    "round": Round,
    "elsewhere": Elsewhere,
    "refused": Refused,
    "lead": Lead,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def encode(message: Message) -> bytes:
    """Returns the line of a message."""
    return json.dumps({"is": _NAMES[type(message)], **message._asdict()}, default=_bits).encode() + b"\n"


def _bits(places: frozenset[int]) -> str:
    """Returns places as bits of a hexadecimal number: those of all nodes take 16 kB at most."""
    return f"{sum(1 << place for place in places):x}"


def decode(line: bytes) -> Message:
    """Reads a line. Raises ValueError for anything that no launcher would have sent."""
    value = loads(line)
    kind = _KINDS.get(str(value.get("is"))) if type(value) is dict else None
    if kind is None or set(value) != {"is", *kind._fields}:
        raise ValueError("it is no message of a launcher")
    return kind(**{name: _field(kind, name, value[name]) for name in kind._fields})


def _field(kind: type[Message], name: str, value: Any) -> Any:
    return None if value is None and (kind, name) in _MAY_BE_NONE else _FIELDS[name](value)


def _text(value: Any) -> str:
    text = check_texts([value])[0]
    if not 0 < len(text) <= _LONGEST_TEXT or not text.isprintable():
        raise ValueError(f"a text is empty, not printable, or longer than {_LONGEST_TEXT} characters")
    return text


def _id(value: Any) -> str:
    if not _ID.fullmatch(_text(value)):
        raise ValueError("it is no launcher's name")
    return str(value)


def _address(value: Any) -> Address:
    if type(value) is not list or len(value) != 2 or not _HOST.fullmatch(_text(value[0])):
        raise ValueError("it is no address: a host's name or number, in ASCII, and a port")
    return Address(value[0], check_integer(value[1], 1, 65535))


def _successors(value: Any) -> tuple[Successor, ...]:
    if type(value) is not list or len(value) > SUCCESSORS:
        raise ValueError("the successors are no list, or too many")
    if not all(type(each) is list and len(each) == 2 for each in value):
        raise ValueError("a successor is a name and an address")
    return tuple(Successor(_id(name), _address(address)) for name, address in value)


def _places(value: Any) -> frozenset[int]:
    if not _BITS.fullmatch(value if type(value) is str else ""):
        raise ValueError("expected places, as bits of a hexadecimal number")
    return frozenset(place for place, bit in enumerate(reversed(f"{int(value, 16):b}")) if bit == "1")


def _truth(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("expected true or false")
    return value


def _place(value: Any) -> int:
    return check_integer(value, -1, _MOST_NODES)


def _number(value: Any) -> int:
    return check_integer(value, 0)


def _nodes(value: Any) -> int:
    return check_integer(value, 0, _MOST_NODES)


_FIELDS: dict[str, Callable[[Any], Any]] = {
    "job": _text,
    "id": _id,
    "address": _address,
    "least": _nodes,
    "most": _nodes,
    "round": _number,
    "number": _number,
    "after": _number,
    "pause": _nodes,
    "place": _place,
    "world": _nodes,
    "store": _address,
    "over": _truth,
    "term": _number,
    "successors": _successors,
    "leads_from": _place,
    "waiting": _nodes,
    "ending": _truth,
    "spare": _truth,
    "missing": _truth,
    "done": _truth,
    "ended": _places,
    "closed": _truth,
    "why": _text,
    "seen": _nodes,
    "same_job": _truth,
    "was_spare": _truth,
}
_MAY_BE_NONE = {(Hello, "store"), (Elsewhere, "address")}
