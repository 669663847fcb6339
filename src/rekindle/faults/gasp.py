"""The dying gasp: after a fault anywhere, secure the state of the newest step that stands, then end.

Nobody votes. Each rank secures what it has, at once, and looks at the others' status pages for one thing only: whether
one of them is already past that step and could no longer offer it. Then it lets its own training finish that update
too, if it can, and secures that step as well. Which step it is to be is decided at the restart.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rekindle.memory.fault import Fault
from rekindle.memory.status import DONE, FAILED, SECURED, SECURING, STABLE, STEPPING, TRAINING, Status
from rekindle.save.gate import Gate

__all__ = ["Gasp"]

log = logging.getLogger("rekindle")

_UPDATE = 5.0
"""Seconds that a rank gets to finish an update; then its state counts as torn."""
_CATCH_UP = 1.0
"""Seconds that a rank gets to finish a step that others have finished. It may be waiting for a dead one in vain."""
_NOTICE = 0.2
"""Seconds in which the other live ranks should have learned of the fault too."""
_TOGETHER = 2.0
"""Seconds that the parts of a step which ranks share out may take, when all of them live; then each secures all."""
_POLL = 0.005

_ALIVE = ("notice", "exception", "loss")
"""What befalls a rank that can still secure its part."""


@dataclass
class Gasp:
    """One rank's. ``run`` does all, once; ``end`` tells the agent that the rank has nothing more to do."""

    gate: Gate
    rank: int
    alone: bool
    """Whether the job has no other rank, so that what this one secures is the whole step."""
    local_ranks: Callable[[bool], list[Status]]
    """Status pages of this node's other ranks: with False, of those that have ended too."""
    secure: Callable[[int, bool], None]
    """Bring the live state, which is that of this step, into memory, or to storage where there is no memory: with True
    all that this rank holds, with False its part of what several hold."""
    shared_by_all: Callable[[int], bool]
    """Whether all ranks of this node have secured their parts of the step, or have none of what others hold too."""
    durable: Callable[[int], bool]
    """Whether the step is on storage."""
    deadline: float
    """Seconds after the fault at which the process ends, come what may."""
    call: Callable[[str, int], object]
    """Call the user's hook of this name, with the step."""
    secured: list[int] = field(default_factory=list)

    def run(self, fault: Fault) -> None:
        """Secure what there is. Doesn't raise."""
        end = fault.noticed + self.deadline
        try:
            self._secure(end, fault.cause)
            if fault.cause == "notice" and self.secured:  # the node may be about to go
                self._wait_for_storage(self.secured[-1], end)
        except Exception as error:
            log.error("the state could not be secured: %s: %s", type(error).__name__, error)
        log.warning("%s secured, %.3f s after the fault", self._what(), time.monotonic() - fault.noticed)

    def end(self) -> None:
        """The status page tells what came of it; the agent gives the rank half a second to leave."""
        self.gate.stage(SECURED if self.secured else FAILED)

    def _what(self) -> str:
        part = "" if self.alone else f"rank {self.rank}'s part of "
        return f"{part}step {' and '.join(map(str, self.secured))}" if self.secured else f"{part or 'the state '}not"

    def _secure(self, end: float, cause: str) -> None:
        if self.gate.phase == DONE:
            if self.gate.snapshot >= self.gate.step:
                self._done(self.gate.snapshot)  # when the guarded part ended
            return
        planned, patience = cause == "notice", _CATCH_UP if cause == "hang" else _UPDATE  # a hang has waited already
        step = self.gate.seize(min(patience, end - time.monotonic()))
        if step is None:
            what = "a step()" if self.gate.phase == STEPPING else "an update"
            log.warning("rank %d's state is torn by %s that did not end: left out", self.rank, what)
            return
        self._take(step, cause, end)
        while time.monotonic() < end and self._left_behind(step, planned):
            self.gate.release()
            further = self.gate.seize(min(_CATCH_UP, end - time.monotonic()), beyond=step)
            if further is None:
                return
            step = further
            self._take(step, cause, end)

    def _take(self, step: int, cause: str, end: float) -> None:
        """Each its part, while all live and are at one step; all of it, whoever else may have it, as soon as not."""
        self.call("on_clean", step)
        whole = cause not in _ALIVE or self._apart(step)
        self.secure(step, whole)
        until = min(end, time.monotonic() + _TOGETHER)
        while not whole and not self.shared_by_all(step):
            if self._apart(step) or time.monotonic() > until:
                self.secure(step, True)
                break
            time.sleep(_POLL)
        self.call("on_gasp", step)
        self._done(step)

    def _apart(self, step: int) -> bool:
        """Whether another rank of this node has gone without having secured ``step``, or is past it."""
        live = {page.pid: page for page in self.local_ranks(True)}
        gone = any(page.pid not in live and page.secured < step for page in self.local_ranks(False))
        return gone or any(_past(page, step) for page in live.values())

    def _done(self, step: int) -> None:
        self.secured.append(step)
        self.gate.stage(SECURING, step)

    def _left_behind(self, step: int, planned: bool) -> bool:
        """Whether a live rank is past ``step``, and has no copy of it; if nobody has died, a copy is no reason to stay.

        First they all must have learned of the fault.
        """
        until = time.monotonic() + _NOTICE
        while time.monotonic() < until and any(page.stage == TRAINING for page in self.local_ranks(True)):
            time.sleep(_POLL)
        return any(_past(page, step) and (planned or page.snapshot < step) for page in self.local_ranks(True))

    def _wait_for_storage(self, step: int, end: float) -> None:
        """Until the step is there, or never will be, because another rank has ended without it."""
        while time.monotonic() < end and not self.durable(step):
            live = {page.pid for page in self.local_ranks(True)}
            over = [page for page in self.local_ranks(False) if page.stage > SECURING or page.pid not in live]
            if any(page.secured != step for page in over):
                log.warning("not all ranks have step %d: the agent sends what they all have once they are gone", step)
                return
            time.sleep(_POLL)


def _past(page: Status, step: int) -> bool:
    return page.step > step or (page.step == step and page.phase != STABLE)
