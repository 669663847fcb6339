"""Tells if the agent reaches the object stores that this process does: it has the environment of whoever started it."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["lacks_access"]

_ACCESS = ("AWS_", "AZURE_", "GOOGLE_")
"""First letters of the variables from which the clients of object stores take credentials and endpoints."""


def lacks_access(pid: int) -> bool:
    """True if process ``pid`` is an agent in whose environment such a variable of ours is missing, or another one.

    False where the kernel doesn't show other processes' environments.
    """
    process = Path(f"/proc/{pid}")
    try:
        if b"rekindle.agent" not in (process / "cmdline").read_bytes().split(b"\0"):
            return False  # a process that carries files itself while no agent can run
        theirs = set((process / "environ").read_bytes().split(b"\0"))
    except OSError:
        return False
    ours = {b"%s=%s" % entry for entry in os.environb.items() if entry[0].startswith(tuple(map(os.fsencode, _ACCESS)))}
    return not ours <= theirs
