"""Defines the record of an incident: how a fault ended a start of a job, and how the next one came back, on one host.

All times of a record are of one host's monotonic clock, which its processes share. They mean nothing on another host,
nor after a boot: times of several hosts are never subtracted from each other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rekindle.errors import FormatError
from rekindle.format.fields import check_integer, check_seconds, check_texts, loads
from rekindle.format.lineage import check_id
from rekindle.memory.prices import Prices

__all__ = ["FAULT", "FIRST_STEP", "FORMED", "GONE", "MOMENTS", "NOTICED", "RESTORED", "SECURED", "STARTED"]
__all__ += ["ENDED", "LONGEST_LINE", "RUNNING", "Incident"]

FAULT = "fault"
"""The moment of the fault itself, where that is known: a hang began with the last progress."""
NOTICED, SECURED, GONE, STARTED = "noticed", "secured", "gone", "started"
"""Moments after it: the last rank to secure its state had done so; the last process of the start had ended; the next
start's first process on this host was started."""
FORMED, RESTORED, FIRST_STEP = "formed", "restored", "first_step"
"""Moments of the next start: its ranks had met; the state was restored; the first ``ckpt.step()`` had returned."""
MOMENTS = (NOTICED, SECURED, GONE, STARTED, FORMED, RESTORED, FIRST_STEP)
"""The moments after the fault, in order."""

ENDED, RUNNING = "end", "running"
"""Causes in place of a fault: the job has ended well; and, in no file, it runs. Goodput needs these stretches, too."""
LONGEST_LINE = 16 << 10
"""Bytes of a record, at most. One takes about 800."""

_WORDS, _NAME = 512, 64
"""Longest description of a fault, and name of a host, in characters."""
_VERSION = 1


@dataclass(frozen=True)
class Incident:
    """Describes the end of one start on one host, and the recovery as far as it has come. A step is -1 if unknown."""

    start: str
    """Id of the incarnation that ended."""
    generation: int
    host: str
    at: float
    """Time of the notice by the wall clock, for people. It orders records of one generation; no duration is computed
    from it."""
    cause: str
    """As in ``Fault``; ``unknown`` if nobody noticed; or ``ENDED`` or ``RUNNING``."""
    what: str
    rank: int
    """Rank in which it happened; -1 if unknown."""
    step: int
    """Updates that all ranks of this host had completed."""
    began_at: int
    """Step that the start had begun from."""
    seconds: float | None
    """Length of the start, from its first process to the fault."""
    trained: float | None
    """Seconds of it in which it trained: from its restore to the fault."""
    moments: dict[str, float] = field(default_factory=dict)
    """By name as in ``MOMENTS``, and ``fault``: times of this host's monotonic clock. One that isn't known is left
    out."""
    restored_step: int = -1
    """Step that the next start went on from."""
    place: str = ""
    """Store that the state came from; empty if unknown."""
    warm: bool | None = None
    """True if the next start's process was forked from one that had loaded what the script imports."""
    starts: int | None = None
    """Starts that it took to come back; None if unknown. Those before the last one ended before their ranks had met."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """Seconds that saves took from training on this host, as in ``Prices``; empty if nothing was measured."""

    @property
    def lost(self) -> int | None:
        """Completed steps that had to be computed again."""
        if self.step < 0 or self.restored_step < 0:
            return None
        return max(0, self.step - self.restored_step)

    @property
    def is_fault(self) -> bool:
        """True unless this is no incident, but the stretch up to the job's end or up to now."""
        return self.cause not in (ENDED, RUNNING)

    @property
    def begin(self) -> float | None:
        """The fault, where that is known, else the notice."""
        return self.moments.get(FAULT, self.moments.get(NOTICED))

    def parts(self) -> dict[str, float | None]:
        """Returns the seconds up to each moment from the known one before it, by name; None for one that isn't known.

        The end of the last process may be seen after the next start's first one: then that part is 0.
        """
        found: dict[str, float | None] = {}
        last = self.moments.get(FAULT)
        for name in MOMENTS:
            now = self.moments.get(name)
            found[name] = None if now is None or last is None else max(0.0, now - last)
            last = now if last is None else last if now is None else max(last, now)
        return found

    @property
    def outage(self) -> float | None:
        """Seconds from the fault, or from its notice, to the first new step; None if it didn't come."""
        begin, end = self.begin, self.moments.get(FIRST_STEP)
        return None if begin is None or end is None else max(0.0, end - begin)

    @property
    def name(self) -> str:
        """Name of the record's file. A start ends once on each host; names sort by the order of starts."""
        host = re.sub(r"[^A-Za-z0-9_.-]", "_", self.host)[:_NAME]
        return f"{self.generation:010d}-{self.start}-{host}.jsonl"

    @property
    def order(self) -> tuple[int, float, str]:
        """Sort key, oldest start first. A start that saved nothing has the generation of the next one."""
        return self.generation, self.at, self.name

    def encode(self) -> bytes:
        """Returns the record as one line of JSON."""
        parts = {name: None if part is None else round(part, 4) for name, part in self.parts().items()}
        outage = None if self.outage is None else round(self.outage, 4)
        told = {**asdict(self), "lost": self.lost, "parts": parts, "outage": outage, "version": _VERSION}
        told |= {"what": self.what[:_WORDS], "host": self.host[:_NAME]}
        return json.dumps(told).encode() + b"\n"

    def to_json(self) -> dict[str, Any]:
        """Returns the record as JSON, with all that is derived."""
        return dict(loads(self.encode()))

    @staticmethod
    def decode(line: bytes) -> Incident:
        """Reads a record. Raises FormatError for a torn or foreign line, and for one of a later version."""
        try:
            if len(line) > LONGEST_LINE:
                raise ValueError(f"it is longer than {LONGEST_LINE} bytes")
            value: Any = loads(line)
            if check_integer(value["version"]) != _VERSION:
                raise ValueError("it is of a later version of Rekindle")
            host, cause, what, place = check_texts([value[name] for name in ("host", "cause", "what", "place")])
            if type(value["warm"]) not in (bool, type(None)) or type(value["moments"]) is not dict:
                raise ValueError("a field is malformed")
            if (at := check_seconds(value["at"])) < 0:  # calendars don't go back as far as they go on
                raise ValueError("it is of before 1970")
            known = {name: check_seconds(at) for name, at in value["moments"].items() if name in (FAULT, *MOMENTS)}
            return Incident(
                start=check_id(value["start"]),
                generation=check_integer(value["generation"]),
                host=host,
                at=at,
                cause=cause,
                what=what,
                rank=check_integer(value["rank"], -1),
                step=check_integer(value["step"], -1),
                began_at=check_integer(value["began_at"], -1),
                seconds=_optional(value["seconds"]),
                trained=_optional(value["trained"]),
                moments=known,
                restored_step=check_integer(value["restored_step"], -1),
                place=place,
                warm=value["warm"],
                starts=None if value["starts"] is None else check_integer(value["starts"]),
                prices={} if (prices := Prices.from_json(value.get("prices", {}))) is None else prices.to_json(),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"is no record of an incident: {error}") from error


def _optional(value: Any) -> float | None:
    return None if value is None else check_seconds(value)
