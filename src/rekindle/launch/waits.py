"""Shortens the wait of torchrun's agent for the end of a rank."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable
from contextlib import ExitStack

__all__ = ["wait_for_ends"]


def wait_for_ends(pids: Iterable[int], seconds: float) -> None:
    """Return once all of these child processes have ended. Give up ``seconds`` after the first has, or if none does.

    torchrun would look once in as long. Those that outlive the first get the time because the node's agent has told
    them of the fault, and they end by themselves; torchrun's SIGTERM would be a notice of another kind to them.
    """
    with ExitStack() as opened:
        running = select.poll()
        count = sum(_watch(running, pid, opened) for pid in pids)
        if not count:
            time.sleep(seconds)
        elif ended := running.poll(seconds * 1000):
            until = time.monotonic() + seconds
            while ended and (count := count - len(ended)):
                for descriptor, _ in ended:
                    running.unregister(descriptor)
                ended = running.poll(max(0.0, until - time.monotonic()) * 1000)


def _watch(running: select.poll, pid: int, opened: ExitStack) -> bool:
    """Adds a process. Returns False if it has ended, as torchrun knows, or if this system can't watch it."""
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):  # not on macOS, nor before Linux 5.3
        return False
    opened.callback(os.close, descriptor)
    running.register(descriptor, select.POLLIN)
    return True
