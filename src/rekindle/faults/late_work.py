"""Judges what devices do after a fault was noticed: the end of what training wanted, or what follows an abort."""

from __future__ import annotations

import re

from rekindle.faults.nccl import aborts_by_itself
from rekindle.memory.fault import Fault

__all__ = ["SURVIVED", "late_work_counts"]

SURVIVED = ("notice", "exception", "loss")
"""Causes of a fault whose rank lives on, and can still secure its part."""

_FAILED_COLLECTIVE = re.compile(r" raised Dist\w*Error")
"""Words of an exception of torch.distributed: a communicator that fails may have been aborted."""


def late_work_counts(fault: Fault) -> bool:
    """Returns True if what is queued on devices either ends as it should or not at all, unless this library stops it.

    A collective that waits for a dead rank ends only by being aborted, and the work behind it goes on as if it had
    succeeded, with gradients that are none. NCCL's own error handling aborts when it notices a death, at any time.
    """
    if _FAILED_COLLECTIVE.search(fault.what):
        return False
    return fault.cause in SURVIVED or not aborts_by_itself()
