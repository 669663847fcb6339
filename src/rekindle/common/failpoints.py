"""Defines named points at which a test, or a rehearsal, lets this process die for real.

``REKINDLE_FAILPOINT=name`` or ``name@step`` makes the process send itself SIGKILL when it reaches that point. When
it is unset, a point costs one comparison. ``POINTS`` lists the names, so that a test can walk all of them.
"""

from __future__ import annotations

import os
import signal

__all__ = ["POINTS", "arm", "reach"]

POINTS = {
    "save": (
        "save.recycled",  # an older snapshot's receipt is gone, its file is free
        "save.copying",  # some of the bytes are in the slot
        "save.copied",  # all bytes are in, nothing is visible
        "save.renamed",  # the shard has its name, there is no receipt
        "save.receipt",  # half of the receipt is in its temporary file
        "save.committed",
    ),
    "drain": (
        "drain.started",  # the partial directory exists
        "drain.copying",  # some of a shard's bytes are in its temporary file
        "drain.written",  # all bytes are in, not yet synced
        "drain.shard",  # the shard has its name, there is no receipt
        "drain.receipt",  # this rank's receipt is there
        "drain.manifest",  # the manifest is synced in the partial directory
        "drain.aside",  # an older incarnation's checkpoint of the step was moved aside
        "drain.published",  # the directory has its final name
        "drain.prune",  # a surplus checkpoint lost its manifest, its files are there
    ),
    "files": (
        "files.copied",  # all bytes of a file are in its slot, nothing is visible
        "files.renamed",  # the data has its name, there is no receipt
        "files.committed",
    ),
    "upload": (
        "upload.started",  # nothing of a file is on storage
        "upload.copying",  # some of its bytes are
        "upload.written",  # all bytes are, the path shows the old file
        "upload.placed",  # the path shows the new file, and memory doesn't know
        "upload.noted",
        "upload.evicted",  # a file that storage has lost its receipt in memory, its data is there
    ),
}

# Module-level state, as a process dies as a whole.
_name, _step = "", ""


def arm(point: str) -> None:
    """Makes the process die at ``point`` from now on: ``name``, ``name@step``, or an empty string for never."""
    global _name, _step
    _name, _, _step = point.partition("@")


arm(os.environ.get("REKINDLE_FAILPOINT", ""))


def reach(name: str, step: int) -> None:
    """Kills the process if this point is armed."""
    if name == _name and (not _step or int(_step) == step):
        os.kill(os.getpid(), signal.SIGKILL)
