"""Decides which of several faults of one start was the first cause: an exception may follow from another node's end."""

from __future__ import annotations

import re

from rekindle.memory.fault import LOST, Fault

__all__ = ["first_of", "follows", "is_failed_collective", "is_held", "tells_of_failed_collective"]

_FIRST_WITHIN = 2.0
"""Seconds within which a fault that another node tells of, or the loss of a node, may be the cause of one that was
announced before. A node counts as lost after a second at the least."""
_AT_ONCE = 0.02
"""Seconds within which two faults count as simultaneous: times of other nodes are known to some milliseconds."""
_PRIMARY = ("signal", "oom", LOST, "notice", "hang", "loss")
"""Causes that don't follow from a fault of another rank."""
_FOLLOWS = re.compile(r"Dist\w*Error|gloo|NCCL|Connection (closed|reset)|Broken pipe")
"""Words of an exception that a failed collective has raised."""


def is_failed_collective(fault: Fault) -> bool:
    """True if a rank has raised because a collective failed, as it does when another rank has ended."""
    return fault.cause == "exception" and tells_of_failed_collective(fault.what)


def tells_of_failed_collective(what: str) -> bool:
    """True if the line on an exception says that a failed collective has raised it."""
    return _FOLLOWS.search(what) is not None


def is_held(fault: Fault) -> bool:
    """True if a fault may follow from one on another node, so that those are to be asked first."""
    return fault.cause not in _PRIMARY


def _weight(fault: Fault) -> int:
    if fault.cause in _PRIMARY:
        return 0
    return 3 if is_failed_collective(fault) else 2 if fault.cause == "exception" else 1


def _precedes(one: Fault, other: Fault) -> bool:
    """True if ``one`` is the likelier first cause. All nodes decide alike, though their clocks differ a little."""
    if _weight(one) != _weight(other):
        return _weight(one) < _weight(other)
    if abs(one.noticed - other.noticed) > _AT_ONCE:
        return one.noticed < other.noticed
    return one.rank < other.rank


def first_of(faults: list[Fault]) -> Fault:
    """Returns the likeliest first cause of all."""
    found = faults[0]
    for fault in faults[1:]:
        found = fault if _precedes(fault, found) else found
    return found


def follows(known: Fault, told: Fault) -> bool:
    """True if a fault that was announced already may have followed from one that is told of now."""
    return _precedes(told, known) and abs(told.noticed - known.noticed) < _FIRST_WITHIN
