"""Shortens the waits of torchrun's agent: for the end of a rank, and for other nodes at a rendezvous."""

from __future__ import annotations

import math
import os
import random
import select
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Event
from typing import Any

__all__ = ["short_delays", "wait_for_ends"]

_LOOKS_A_SECOND = 100
"""Looks that all nodes together take at the rendezvous while they wait for each other: each costs its store about
0.1 ms."""
_LONGEST_DELAY = 0.25
"""Seconds between two looks of a spare node, which waits for as long as the job runs."""
_GROWTH = 0.02
"""Seconds of delay for each second waited so far, once that is more than the nodes' number asks for."""
_SAME_WAIT = 2.0
"""Seconds between two delays of one and the same wait, at most."""


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


@contextmanager
def short_delays(nodes: int) -> Iterator[None]:
    """Has the rendezvous of at most so many nodes wait 10 ms for each of them where torch waits longer.

    torch waits up to 0.3 s at random before each of the first two rounds, to spread the nodes, and 1 s between two
    looks for the others, however few there are; a state that is younger than 1 s is not even looked for. It also notes
    each of its acts with the name of a method, for which it reads the source lines of the whole stack; here the name is
    read alone.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous  # noqa: PLC0415  # other commands need no torch

    module: Any = dynamic_rendezvous  # torch names no place for another pace
    look_anew = Event()
    began = last = -math.inf

    def delay(seconds: float | tuple[float, float]) -> None:
        nonlocal began, last
        now = time.monotonic()
        if now - last > _SAME_WAIT:
            began = now
        longest = random.uniform(*seconds) if isinstance(seconds, tuple) else seconds
        grown = min(_LONGEST_DELAY, (now - began) * _GROWTH)
        time.sleep(min(longest, max(nodes / _LOOKS_A_SECOND, grown)))
        last = time.monotonic()
        look_anew.set()

    def method_name(depth: int = 2) -> str:
        return sys._getframe(depth).f_code.co_name

    class StateHolder(module._BackendRendezvousStateHolder):  # type: ignore[misc]
        def sync(self) -> bool | None:
            if look_anew.is_set():  # set by the thread that waits; that of the signs of life doesn't run meanwhile
                look_anew.clear()
                self._last_sync_time = -1.0
            changed: bool | None = super().sync()
            return changed

    ours = {"_delay": delay, "get_method_name": method_name, "_BackendRendezvousStateHolder": StateHolder}
    before = {name: getattr(module, name) for name in ours if hasattr(module, name)}
    for name in before:
        setattr(module, name, ours[name])
    try:
        yield
    finally:
        for name, own in before.items():
            setattr(module, name, own)
