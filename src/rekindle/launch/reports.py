"""Reads what the ranks of this node have left for the launcher: their roots, their newest steps, and why they ended."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import rekindle.errors
from rekindle.agent.first_cause import tells_of_failed_collective
from rekindle.errors import FormatError, RekindleError
from rekindle.faults.torchelastic import REFUSED, SURVIVOR_EXIT
from rekindle.format.fields import loads
from rekindle.format.names import Root, canonical_root
from rekindle.memory.fault import Fault
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.paths import STATUS_PAGES, matching
from rekindle.memory.status import read_status
from rekindle.storage.listing import list_copies_within

__all__ = ["describe_exit", "describe_fault", "first_failure", "first_words", "forget_refusal"]
__all__ += [
    "newest_steps",
    "own_error",
    "reached_step",
    "reported_jobs",
    "reported_roots",
    "take_refusal",
    "traceback_of",
]

_ANSWERS_WITHIN = 5.0
"""Seconds that storage gets to list what is saved."""
_UNCAUGHT = 1
"""Exit code of Python after an uncaught error."""
_UNCERTAIN = 2
"""Seconds by which torchrun's times may be wrong. They are whole, and a rank that has left none gets the one at which
torchrun looks."""
_ENDED_BY_OTHERS = (signal.SIGTERM, signal.SIGABRT)
"""Signals by which the launcher, or torch in a rank whose collective has failed, ends a rank."""
_OWN_ERRORS = ("exception", "loss")
"""Causes of a failure that may be an error of the script's own."""


def reported_roots(place: Path) -> list[tuple[Root, Path]]:
    """Returns each root that the ranks of this node have reported, and the base of its job's memory."""
    found = sorted(json.loads(path.read_text()) for path in place.glob("*.json"))
    return [(canonical_root(root), memory_base(memory)) for root, memory in found]


def reported_jobs(place: Path) -> list[JobDir]:
    """Returns the directory in memory of each job whose root the ranks of this node have reported."""
    return [JobDir.of(root, base) for root, base in reported_roots(place)]


def describe_fault(place: Path, since: float, code: int) -> str:
    """Describes, in brackets, the fault that ended a rank where its exit code doesn't tell; empty for no such fault.

    That of a killed one doesn't tell of a hang or a want of memory; that of one that has survived a fault says no more.
    """
    if code not in (-signal.SIGKILL, SURVIVOR_EXIT):
        return ""
    told = [fault for fault in _faults(place, since) if fault.cause in ("hang", "oom") or code == SURVIVOR_EXIT]
    newest = max(told, key=lambda fault: fault.at, default=None)
    return f" ({newest.what})" if newest is not None else ""


def _faults(place: Path, since: float) -> list[Fault]:
    """Returns the fault of each reported job that was noticed since that time, by the wall clock."""
    faults = []
    for job in reported_jobs(place):
        with suppress(OSError, ValueError, KeyError, TypeError):
            faults.append(Fault.from_json(loads(job.paths.fault.read_bytes())))
    return [fault for fault in faults if fault.at >= since]


def newest_steps(place: Path, since: float) -> dict[str, int]:
    """Maps each reported root to the newest step that its ranks have completed or saved; -1 for none.

    ``since`` is the monotonic time at which the ranks were started. Only where this node's memory knows of no step is
    storage listed: the ranks wait meanwhile.
    """
    found = {}
    for root, base in reported_roots(place):
        job = JobDir.of(root, base)
        steps = [*_completed(job, since), *(stamp.step for stamp, _ in job.snapshots.shard_ids())]
        durable = job.notes.durable()
        newest = max([*steps, -1 if durable is None else durable])
        found[str(root)] = newest if newest >= 0 else _newest_on_storage(root, base)
    return found


def _newest_on_storage(root: Root, base: Path) -> int:
    with suppress(OSError, RekindleError):
        listed, _ = list_copies_within(root, base, _ANSWERS_WITHIN)
        return max((entry.copy.step for entry in listed if entry.condition == "complete"), default=-1)
    return -1


def reached_step(place: Path, since: float) -> int | None:
    """Returns the newest step that a rank inside of ``guard()`` has completed since that monotonic time, or None."""
    return max((step for job in reported_jobs(place) for step in _completed(job, since)), default=None)


def _completed(job: JobDir, since: float) -> list[int]:
    """Returns the step of each rank that was inside of ``guard()``: its page outlives it."""
    found = []
    for path in matching(job.path, STATUS_PAGES):
        with suppress(OSError, FormatError):
            page = read_status(path)
            if page.progress / 1e9 >= since:
                found.append(page.step)
    return found


def take_refusal(place: Path, failures: Mapping[int, Any]) -> RekindleError | None:
    """Returns the error with which a rank has ended, if each further start would meet it, and forgets it.

    A program that a rank has run, to evaluate say, leaves its error in the same place. It counts for nothing if no rank
    has ended as Python does after an uncaught error.
    """
    path = place / REFUSED
    try:
        name, why = json.loads(path.read_text())
        path.unlink()
    except FileNotFoundError:
        return None
    if all(failure.exitcode != _UNCAUGHT for failure in failures.values()):
        return None
    kind: type[RekindleError] = getattr(rekindle.errors, name)
    return kind(why)


def forget_refusal(place: Path) -> None:
    """Removes an error that a rank has left and nobody has taken: the launcher ended that one for other nodes."""
    (place / REFUSED).unlink(missing_ok=True)


# -- torch's record of a failure ---------------------------------------------------------------------------------


def first_failure(place: Path, since: float, failures: Mapping[int, Any]) -> tuple[int, Any]:
    """Returns the rank that failed first, and how: by the record of the node's agent, else by torchrun's.

    ``since`` is the time at which the ranks were started, by the wall clock. A rank may die before there is an agent.
    """
    noticed = [fault for fault in _faults(place, since) if fault.rank in failures]
    if noticed:
        rank = min(noticed, key=lambda fault: fault.at).rank
    else:
        rank = min(failures, key=lambda rank: _when(failures[rank]))
    return rank, failures[rank]


def _when(failure: Any) -> tuple[float, float]:
    """Returns the time of a failure, to be compared with others. What can't follow from another's comes before it.

    A killed rank leaves no time, but the others do, whose collectives fail because of it.
    """
    at = _extra(failure).get("at", math.inf)
    if failure.exitcode < 0 and -failure.exitcode not in _ENDED_BY_OTHERS and at == math.inf:
        return failure.timestamp - _UNCERTAIN, at
    follows = tells_of_failed_collective(first_words(failure.message))
    return failure.timestamp + (_UNCERTAIN if follows else 0), at


def describe_exit(code: Any) -> str:
    """Describes the end of a process by its exit code, as subprocess gives it."""
    if code == -signal.SIGTERM:
        return "failed"  # torchrun told it to end while it was about to
    if not isinstance(code, int) or code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def first_words(message: Any) -> str:
    """Returns the first line of a rank's message about its failure; empty when it left none."""
    return str(message.get("message", "")).partition("\n")[0] if isinstance(message, dict) else ""


def _extra(failure: Any) -> dict[str, Any]:
    """Returns what a rank has left about its failure besides the message; empty when it left nothing."""
    message = failure.message
    found = message.get("extraInfo") if isinstance(message, dict) else None
    return found if isinstance(found, dict) else {}


def own_error(failure: Any) -> tuple[str | None, bool]:
    """Returns what the script has ended with, None if it was ended, and True if that is an exception."""
    text = first_words(failure.message)
    if failure.exitcode <= 0 or _extra(failure).get("cause", _OWN_ERRORS[0]) not in _OWN_ERRORS:
        return None, False
    if text:
        return text, True
    return (None if failure.exitcode == SURVIVOR_EXIT else f"exit code {failure.exitcode}"), False


def traceback_of(failure: Any) -> str:
    """Returns the traceback that a rank has left; empty without one."""
    return str(_extra(failure).get("py_callstack", ""))
