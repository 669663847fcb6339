"""Defines the record of a fault, for the process that notices it, those that are told, and commands that show it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from rekindle.errors import FormatError
from rekindle.format.fields import check_integer, check_seconds, check_texts

__all__ = ["CAUSES", "LOST", "Fault"]

LOST = "lost"
"""Cause of the fault that a whole node is lost. Its rank is the node's first."""
CAUSES = ("exception", "exit", "signal", "oom", "notice", "hang", "loss", LOST)
"""All causes, as ``Fault.cause`` tells them."""


@dataclass(frozen=True)
class Fault:
    """Describes one fault as it was first noticed."""

    cause: str
    """``exception``, ``exit``, ``signal``, ``oom``, ``notice`` (the process was told to end), ``hang``, ``loss`` (of
    training: it is not a number) or ``lost`` (the rank's node is)."""
    rank: int
    generation: int
    """Generation of the start in which it happened."""
    step: int
    """Updates that the rank had completed; -1 if unknown."""
    what: str
    """One line, such as "rank 3 was killed by SIGKILL"."""
    detail: str = ""
    """Further text, such as a traceback."""
    noticed: float = field(default_factory=time.monotonic)
    """Time at which it was noticed, by this node's monotonic clock, in seconds."""
    at: float = field(default_factory=time.time)
    """The same by the wall clock, for people."""
    began: float | None = None
    """Time at which it happened, by the monotonic clock, where that is known: a hang begins with the last progress."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Any) -> Fault:
        """Reads the record from JSON. Raises FormatError when a field is missing or malformed."""
        try:
            cause, what, detail = check_texts([value["cause"], value["what"], value["detail"]])
            times = check_seconds(value["noticed"]), check_seconds(value["at"])
            rank, generation, step = (
                check_integer(value["rank"]),
                check_integer(value["generation"]),
                check_integer(value["step"], -1),
            )
            began = value.get("began")
            began = None if began is None else check_seconds(began)
            return Fault(cause, rank, generation, step, what, detail, *times, began)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"the record of a fault is not readable: {error!r}") from error
