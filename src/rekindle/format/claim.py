"""Defines claims, by which the starts of a job say at its root which of them goes on, and the rule of who may.

The newest claim counts, the one of the highest number: its start alone writes checkpoints. A start may claim after
the newest one if its nodes remember the start of that: then it is what has become of it. Nodes that remember an earlier
start only were away while the job went on without them, perhaps somewhere else at this very moment, and may not. Nodes
that remember nothing are somebody's new start, and may.

All functions here are pure. ``rekindle.storage.claims`` reads and writes claims, docs/decisions/0045 explains the rule.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

from rekindle.errors import FormatError
from rekindle.format.fields import check_integer, check_texts
from rekindle.format.lineage import MAX_GENERATION, check_id
from rekindle.format.names import MAX_CLAIM, MAX_RANKS
from rekindle.format.receipt import VERSION, parse_document, seal

__all__ = ["LONGEST_CLAIM", "MOST_HOSTS", "Claim", "Past", "Starts", "describe_conflict", "is_earlier"]
__all__ += ["is_in_the_way", "is_minority", "is_unfinished", "may_follow"]

_KIND = "rekindle-claim"
MOST_HOSTS = 8
"""Hosts that a claim names."""
_LONGEST_NAME = 255
LONGEST_CLAIM = 1 << 14
"""Bytes of a claim's document at most."""


@dataclass(frozen=True)
class Claim:
    """A start's claim of the root: it alone writes there, until a later start makes a claim."""

    start: str
    """Id of the incarnation; empty for a claim that can't be read."""
    generation: int
    """Generation of the start; 0 for a claim that can't be read."""
    number: int = 0
    """Number of this claim at its root. 0 until it is made."""
    after: int = 0
    """Newest number that it may follow, whoever made that claim. With 0 it follows starts that its nodes remember."""
    hosts: list[str] = field(default_factory=list)
    """Names of the first hosts."""
    nodes: int = 1
    """Number of nodes."""
    world: int = 1
    at: str = ""
    """Time of the start, as ISO 8601 in UTC. For people only."""
    launch: str = ""
    """Name of what a scheduler has launched, different each time that it does; empty where there is none."""

    def encode(self) -> bytes:
        """Returns the document of this claim."""
        fields = {"format": _KIND, "version": VERSION, **asdict(self)}
        return seal(json.dumps(fields, separators=(",", ":")).encode()[1:])

    @staticmethod
    def decode(data: bytes, where: str | os.PathLike[str]) -> Claim:
        """Reads the document of a claim. Raises FormatError when it is damaged or malformed."""
        fields = parse_document(data, _KIND, where)
        try:
            return Claim.from_json(fields)
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{os.fspath(where)}: is not the claim of a start: {error!r}") from error

    @staticmethod
    def from_json(value: Any) -> Claim:
        """Reads the fields of a claim. Raises ValueError, TypeError or KeyError when one is missing or malformed."""
        at, launch, *hosts = check_texts([value["at"], value["launch"], *check_texts(value["hosts"])])
        if len(hosts) > MOST_HOSTS or max(map(len, (at, launch, *hosts))) > _LONGEST_NAME:
            raise ValueError("a name is too long, or there are too many")
        return Claim(
            start=check_id(value["start"]),
            generation=check_integer(value["generation"], 0, MAX_GENERATION),
            number=check_integer(value["number"], 0, MAX_CLAIM),
            after=check_integer(value["after"], 0, MAX_CLAIM),
            hosts=hosts,
            nodes=check_integer(value["nodes"], 1, MAX_RANKS),
            world=check_integer(value["world"], 1, MAX_RANKS),
            at=at,
            launch=launch,
        )


@dataclass(frozen=True)
class Past:
    """An earlier start of the job, as a node remembers it."""

    start: str
    """Id of the incarnation."""
    launch: str = ""
    """``Claim.launch`` of it."""
    at: str = ""
    """``Claim.at`` of one that went on; empty for one that may have ended before."""


@dataclass(frozen=True)
class Starts:
    """A start with what its nodes remember of earlier ones."""

    own: Claim
    """Its claim, made or not yet."""
    past: tuple[Past, ...] = ()
    """Earlier starts, oldest first. None from before one whose claim is known to have been made."""
    settled: bool = True
    """False until its ranks have agreed that it goes on. Up to then nobody else makes its claim."""

    @property
    def remembered(self) -> tuple[Past, ...]:
        """All that a later start on these nodes may have gone on from."""
        return (*self.past, Past(self.own.start, self.own.launch, self.own.at if self.settled else ""))


def is_in_the_way(newest: Claim | None, own: Claim, past: Collection[Past]) -> bool:
    """True if ``own`` may not be claimed, nor written by, while ``newest`` is the newest claim at the root."""
    if newest is None or newest.start == own.start or newest.number <= own.after:
        return False
    return newest.start not in {one.start for one in past}


def may_follow(newest: Claim | None, own: Claim, past: Collection[Past]) -> bool:
    """True if a start that has not claimed yet may do so after ``newest``: the rule of who may go on.

    A scheduler that has launched the job anew, neither as what these nodes remember nor as what made ``newest``, has
    ended those before, and decided that this one goes on.
    """
    if not past or not is_in_the_way(newest, own, past):
        return True
    assert newest is not None
    return bool(own.launch) and own.launch not in {newest.launch, *(one.launch for one in past)}


def is_minority(newest: Claim, own: Claim, present: int) -> bool:
    """True if only ``present`` of the nodes of ``newest`` are here: the others may be more, and then have precedence.

    Nobody has who was launched anew by a scheduler.
    """
    anew = own.launch and own.launch != newest.launch
    return not anew and 0 < 2 * present < newest.nodes


def is_unfinished(data: bytes) -> bool:
    """True if ``data`` is only the beginning of a claim's document: its start is still writing it, or has ended."""
    return not data.endswith(b"}")


def is_earlier(newest: Claim, known: Collection[Past]) -> bool:
    """True if the ``newest`` claim is of a start that began before one of the ``known`` ones. For words only.

    The root was put back to an earlier state then, as from a backup, or that start has made its claim late.
    """
    return bool(newest.start) and newest.at < max((one.at for one in known), default="")


def describe_conflict(newest: Claim, known: Collection[Past]) -> str:
    """Describes, for a sentence, why nodes that took part in the ``known`` starts may not go on after ``newest``."""
    if not is_earlier(newest, known):
        return f"the job goes on elsewhere, by {_describe_claim(newest)}"
    return (
        f"the newest claim there, number {newest.number}, is of {_describe_claim(newest)}, which began before the last "
        "start on the nodes here: the root was put back to an earlier state, as from a backup, or that start has begun "
        "to save since"
    )


def _describe_claim(claim: Claim) -> str:
    """Describes the start of a claim, for a sentence."""
    if not claim.start:
        return f"a start whose claim, number {claim.number}, can't be read"
    more = claim.nodes - len(claim.hosts)
    hosts = ", ".join(claim.hosts) + (f" and {more} more" if more > 0 else "")
    return f"a start of generation {claim.generation}, at {claim.at} on {hosts or 'a host without a name'}"
