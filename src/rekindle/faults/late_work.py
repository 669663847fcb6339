"""Judges what devices do after a fault was noticed: the end of what training wanted, or what follows an abort."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator

from rekindle.faults.nccl import aborts_by_itself
from rekindle.memory.fault import Fault

__all__ = ["SURVIVED", "describe_raised", "late_work_counts"]

SURVIVED = ("notice", "exception", "loss")
"""Causes of a fault whose rank lives on, and can still secure its part."""

_COLLECTIVE = re.compile(r"Dist\w*Error")
"""Names of torch.distributed's exceptions: a communicator that fails may have been aborted."""
_FAILED_COLLECTIVE = re.compile(rf" raised {_COLLECTIVE.pattern}| \(from {_COLLECTIVE.pattern}\)$")
"""Words of ``describe_raised`` of such an exception, and of one that a framework raised because of it."""
_CHAIN = 100
"""Exceptions that led to each other which are looked at."""
_LINE, _LONGEST = 500, 16 << 10
"""Characters of what was raised, and of its traceback, that others are told."""


def describe_raised(error: BaseException, rank: int | str) -> tuple[str, str]:
    """Returns one line on what a rank raised, and the traceback.

    The line names a failed collective that led to it: all ranks judge by that.
    """
    raised = f"{type(error).__name__}: {error}".removesuffix(": ")  # Ctrl-C has no message
    what = f"rank {rank} raised {raised}".partition("\n")[0][:_LINE]
    found = next((name for name in _causes(error) if _COLLECTIVE.fullmatch(name)), None)
    what = f"{what} (from {found})" if found is not None else what
    return what, "".join(traceback.format_exception(error))[-_LONGEST:]


def _causes(error: BaseException) -> Iterator[str]:
    """Yields the names of the exceptions that led to ``error``, also of those that Python leaves out of a traceback."""
    todo, seen = [error], {id(error)}
    while todo and len(seen) < _CHAIN:
        one = todo.pop()
        for cause in (one.__cause__, one.__context__):
            if cause is not None and id(cause) not in seen:
                seen.add(id(cause))
                todo.append(cause)
                yield type(cause).__name__


def late_work_counts(fault: Fault) -> bool:
    """Returns True if what is queued on devices either ends as it should or not at all, unless this library stops it.

    A collective that waits for a dead rank ends only by being aborted, and the work behind it goes on as if it had
    succeeded, with gradients that are none. NCCL's own error handling aborts when it notices a death, at any time.
    """
    if _FAILED_COLLECTIVE.search(fault.what):
        return False
    return fault.cause in SURVIVED or not aborts_by_itself()
