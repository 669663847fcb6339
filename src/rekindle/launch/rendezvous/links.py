"""Holds what a launcher knows of each of its connections, and of a search for the one that leads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rekindle.launch.rendezvous.wire import Address, News

__all__ = ["Answer", "Link", "Search"]

Answer = Literal["awaited", "none", "seeks", "follows"]
"""The answer of one that is asked who leads."""


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
