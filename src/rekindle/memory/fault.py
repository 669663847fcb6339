"""What has gone wrong in a job: one record for whoever notices it, whoever is told, and whoever asks later."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from rekindle.errors import FormatError
from rekindle.format.fields import check_integer, check_seconds, check_texts

__all__ = ["Fault"]


@dataclass(frozen=True)
class Fault:
    """One fault, as it was first noticed."""

    cause: str
    """``exception``, ``exit``, ``signal``, ``oom``, ``notice`` (told to go), ``hang`` or ``loss``."""
    rank: int
    generation: int
    """Number of the job's start that it struck."""
    step: int
    """Updates that the rank had completed; -1 where that is not known."""
    what: str
    """One line: "rank 3 was killed by SIGKILL"."""
    detail: str = ""
    """A traceback, or what else there is to read."""
    noticed: float = field(default_factory=time.monotonic)
    """By this node's monotonic clock, in seconds."""
    at: float = field(default_factory=time.time)
    """By the wall clock, for people."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Any) -> Fault:
        """Raises FormatError when it is none."""
        try:
            cause, what, detail = check_texts([value["cause"], value["what"], value["detail"]])
            times = check_seconds(value["noticed"]), check_seconds(value["at"])
            rank, generation, step = (
                check_integer(value["rank"]),
                check_integer(value["generation"]),
                check_integer(value["step"], -1),
            )
            return Fault(cause, rank, generation, step, what, detail, *times)
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"a fault is not readable: {error!r}") from error
