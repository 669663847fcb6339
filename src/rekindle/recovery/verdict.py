"""What torchrun is told of a failure, so that its own report blames the rank that was the first."""

from __future__ import annotations

import json
import os
from contextlib import suppress

from rekindle.agent.fault import Fault

__all__ = ["tell_launcher"]

_LATER = 2
"""Seconds by which the others' failures are dated later. torchrun takes the earliest for the cause; it counts in whole
seconds, and dates a rank that left no file when it looks."""


def tell_launcher(fault: Fault, rank: int) -> None:
    """Leave a file for torchrun, if that is the launcher: the fault, or the fault of another that ended this rank.

    The file is that of torch's ``elastic.multiprocessing.errors``, which torchrun reads once a rank has failed.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    own = fault.rank == rank
    message = fault.what if own else f"ended because {fault.what}"
    extra = {"py_callstack": fault.detail or message if own else message}
    extra["timestamp"] = str(int(fault.at) + (0 if own else _LATER))
    with suppress(OSError), open(path, "w") as file:
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)
