"""Ends a program as a fault or a cluster does."""

from __future__ import annotations

import os
import signal
import threading

__all__ = ["die"]

GRACE = 30.0
"""Seconds that clusters leave between SIGTERM and SIGKILL."""


def die(name: str) -> None:
    """Gets a signal, such as "KILL". SIGTERM is followed by SIGKILL when its grace is over."""
    if name == "TERM":
        killer = threading.Timer(GRACE, os.kill, (os.getpid(), signal.SIGKILL))
        killer.daemon = True
        killer.start()
    os.kill(os.getpid(), signal.Signals["SIG" + name])
