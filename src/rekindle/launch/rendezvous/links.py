"""Holds what a launcher knows of itself, of each of its connections, and of a search for the one that leads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from rekindle.launch.rendezvous.roster import ENDS_WITHIN
from rekindle.launch.rendezvous.wire import Address, Message, News

__all__ = ["Answer", "Identity", "Link", "Output", "Search"]

Answer = Literal["awaited", "none", "seeks", "follows"]
"""The answer of one that is asked who leads."""


class Identity(NamedTuple):
    """One launcher, and the job that it is part of."""

    job: str
    id: str
    address: Address
    least: int
    most: int
    last_call: float
    endpoints: tuple[Address, ...]
    """The addresses where the job is to be found."""
    own: tuple[Address, ...]
    """Those of them at which this launcher listens."""
    ends_within: float = ENDS_WITHIN
    """Seconds that ranks get to end."""


class Output(NamedTuple):
    """A thing to be done with a connection. ``message`` is sent over it."""

    act: Literal["connect", "send", "drop"]
    link: int
    address: Address | None = None
    message: Message | None = None


@dataclass
class Link:
    """A connection, by the part that the other end has in it."""

    role: Literal["unknown", "asked", "leader", "member", "rival"]
    heard: float
    """Time of its last message, or of its beginning."""
    address: Address | None = None
    id: str = ""
    told: News | None = None
    """The news that were sent last to a member."""
    round: int = 0
    """The newest round that a member knows of."""


@dataclass
class Search:
    """One time that others are asked who leads."""

    began: float
    first: frozenset[Address]
    """Those that lead in preference to this launcher, if they are there."""
    answers: dict[Address, Answer] = field(default_factory=dict)
