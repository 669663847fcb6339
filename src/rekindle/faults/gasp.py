"""Performs the dying gasp: after a fault anywhere, secures the newest step that is complete, then ends the rank.

Where devices hold the state, the newest step is the one that they have come to, not the one that the host has.

Nobody votes. Each rank secures what it has, at once, and looks at the others for one thing only: is one of them already
past that step, so that it could no longer offer it? Then it lets its own training finish that update
too, if it can, and secures that step as well. Which step counts is decided at the restart.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field

from rekindle.errors import RekindleError
from rekindle.faults.hooks import HookCalls
from rekindle.faults.late_work import SURVIVED
from rekindle.faults.peers import Peers
from rekindle.faults.securing import StateSecurer
from rekindle.memory.fault import LOST, Fault
from rekindle.memory.status import DONE, FAILED, SECURED, SECURING, STABLE, STEPPING, Status
from rekindle.save.gate import Gate
from rekindle.save.progress import StateMoved
from rekindle.storage.catalog import MEMORY

__all__ = ["Gasp"]

log = logging.getLogger("rekindle")

_UPDATE = 5.0
"""Seconds that a rank gets to finish an update; then its state counts as torn."""
_CATCH_UP = 1.0
"""Seconds that a rank gets to finish a step that others have finished. It may be waiting for a dead one in vain."""
_STEPS = 3
"""Recent steps, each as long as the longest, in which devices should have done what was queued."""
_TOGETHER = 2.0
"""Seconds that the parts of a step which ranks share out may take, when all of them live; then each secures all."""
_LEAST = 0.5
"""Seconds that an update gets at the least: steps may be shorter than the time for which a thread gets no processor."""
_LOOK = 0.1
"""Seconds after which a rank that waits looks if a node is not heard any more."""
_POLL = 0.005


@dataclass
class Gasp:
    """The gasp of one rank. ``run`` does all, once; ``end`` tells the agent that the rank has nothing more to do."""

    gate: Gate
    securer: StateSecurer
    peers: Peers
    rank: int
    alone: bool
    """True if the job has no other rank, so that what this one secures is the whole step."""
    ends_at: float
    """Time at which the process ends, come what may, by the monotonic clock."""
    hooks: HookCalls
    secured: dict[int, str] = field(default_factory=dict)
    """Steps that this rank has secured, oldest first, and the place of each: MEMORY or STORAGE."""

    def run(self, fault: Fault) -> None:
        """Secure what there is. Doesn't raise."""
        end = self.ends_at
        try:
            try:
                self._secure_newest(end, fault.cause)
            except Exception as error:
                log.error("rank %d's state could not be secured: %s: %s", self.rank, type(error).__name__, error)
            if not self.secured:
                self._keep_newest_save(end)
            if fault.cause == "notice" and self.secured:  # the node may be about to go
                self._wait_for_storage(max(self.secured), end)
        except Exception as error:
            log.error("rank %d: %s: %s", self.rank, type(error).__name__, error)
        took = time.monotonic() - fault.noticed
        for step, place in self.secured.items():
            self._tell_secured(step, place, took)
        if not self.secured:
            log.warning("rank %d has secured nothing %.3f s after the fault: %s", self.rank, took, self._what_is_left())

    def _tell_secured(self, step: int, place: str, took: float) -> None:
        """Log where the step is; on storage, to which nobody can add a dead rank's part, also whether all of it is."""
        part = "" if self.alone else f"rank {self.rank}'s part of "
        if place == MEMORY:
            log.warning("%sstep %d secured in memory, %.3f s after the fault", part, step, took)
        elif self.alone or self._is_durable(step):
            log.warning("step %d secured on storage, %.3f s after the fault", step, took)
        else:
            log.warning(
                "%sstep %d secured on storage, %.3f s after the fault, but the step is not complete there: the next "
                "start goes on from it only if all other ranks write their parts too, which a killed one doesn't, else "
                "from the newest complete checkpoint",
                *(part, step, took),
            )

    def _is_durable(self, step: int) -> bool:
        """True if storage has all of the step; False also when it can't be asked."""
        with suppress(OSError, RekindleError):
            return self.securer.is_durable(step)
        return False

    def _what_is_left(self) -> str:
        """Returns words on where the next start goes on from without this rank's part of the current step."""
        snapshot = self.gate.snapshot
        later = "" if self.alone else ", or from a later step if other ranks have all of its state"
        if snapshot >= 0:
            return f"the next start goes on from step {snapshot}, its newest in memory{later}"
        return f"the next start goes on from the newest checkpoint on storage, or anew if there is none{later}"

    def end(self) -> None:
        """Show on the status page what came of it; the agent gives the rank half a second to leave."""
        self.gate.stage(SECURED if self.secured else FAILED)

    def _secure_newest(self, end: float, cause: str) -> None:
        if self.gate.phase == DONE:
            if self.gate.snapshot >= self.gate.step:
                self._note_secured(self.gate.snapshot, MEMORY)  # when the guarded part ended
            return
        planned, patience = cause == "notice", _CATCH_UP if cause == "hang" else _UPDATE  # a hang has waited already
        step = self._secure_next(-1, patience, cause, end)
        while step is not None and time.monotonic() < end:
            overtaken, awaited = self._is_overtaken(step, planned), self.gate.awaits(step)
            if not (overtaken or awaited):
                return
            if overtaken:
                self.gate.release()
            patience = max(_CATCH_UP, _STEPS * self.gate.longest) if awaited else _CATCH_UP
            step = self._secure_next(step, patience, cause, end)

    def _secure_next(self, beyond: int, patience: float, cause: str, end: float) -> int | None:
        """Secure the first step after ``beyond`` that the state is that of. Returns it.

        None if there is none in ``patience`` seconds, or it must not be read. They are counted anew when a device goes
        on while it is read, or holds what can't be secured because the host is too far ahead, and may go on.
        """
        while True:
            step = self._seize(min(patience, end - time.monotonic()), beyond, lost=cause == LOST)
            if step is None:
                if not self.secured:
                    log.warning("rank %d is not secured: %s", self.rank, self._why_not())
                return None
            try:
                return step if self._secure_step(step, cause, end) else None
            except RekindleError as error:
                if not (isinstance(error, StateMoved) or self.gate.awaits(step)):
                    raise
                log.warning("step %d is not secured, a later one may be: %s", step, error)
                beyond = step
                self.gate.release()

    def _seize(self, patience: float, beyond: int, *, lost: bool) -> int | None:
        """Seize the first step after ``beyond`` as the gate does, or give up sooner if a node is ``lost``, or missed.

        A collective inside of an update, as of ZeRO's, waits for it in vain. Other updates end within a step's time.
        What follows the first step, ``beyond`` it, has little time anyway.
        """
        step_time = (self.gate.longest or _CATCH_UP) * (_STEPS if self.gate.on_devices else 1)
        began = time.monotonic()
        while True:
            missed = beyond < 0 and (lost or self.peers.misses_a_node)
            most = min(patience, max(step_time, _LEAST)) if missed else patience
            asked = time.monotonic()
            some = max(0.0, min(_LOOK, began + most - asked))
            step = self.gate.seize(some, beyond)
            now = time.monotonic()
            # A gate that answers before its time knows that no step will come.
            if step is not None or now - asked < some or now - began >= most:
                return step

    def _why_not(self) -> str:
        """Returns words on why there is no step that the state is that of."""
        if self.gate.on_devices:
            return f"its device was inside of an update, and did not end it; the host was at step {self.gate.step}"
        where = "inside of its" if self.gate.phase == STEPPING else "between the beginning of an update and its"
        return f"it was past step {self.gate.step}, {where} ckpt.step()"

    def _keep_newest_save(self, end: float) -> None:
        """Wait for the snapshot that is on its way: it is of a step before."""
        step = self.securer.secure_newest_save(min(_UPDATE, end - time.monotonic()))
        if step is not None:
            self._note_secured(step, MEMORY)

    def _secure_step(self, step: int, cause: str, end: float) -> bool:
        """Secure this rank's part while all ranks live and are at one step, and all that it holds once they aren't.

        Returns False if the state must not be read.
        """
        if not self.hooks.clean(step):
            log.warning("rank %d is not secured: on_clean says that step %d's state can't be read", self.rank, step)
            return False
        place = MEMORY
        if cause == "notice" or not self.securer.holds_restored(step):
            place = self._secure_part(step, end, whole=cause not in SURVIVED or self._peers_differ(step))
        self.hooks.gasp(step)
        self._note_secured(step, place)
        return True

    def _secure_part(self, step: int, end: float, *, whole: bool) -> str:
        """Secure this rank's part of the step, or with ``whole`` all that it holds, also once a rank has gone."""
        place = self.securer.secure(step, whole=whole)
        until = min(end, time.monotonic() + _TOGETHER)
        while not whole and not self.securer.is_shared_by_all(step):
            if self._peers_differ(step) or time.monotonic() > until:
                # On storage a dead rank's part can't be made from what others hold: there more would be in vain.
                return self.securer.secure(step, whole=True) if place == MEMORY else place
            time.sleep(_POLL)
        return place

    def _peers_differ(self, step: int) -> bool:
        """True if another rank of this node has gone without a copy of ``step``, or is past it."""
        live = self.peers.live()
        gone = self.peers.all().keys() - live.keys()
        return bool(gone and gone - self.peers.holding(step)) or any(_is_past(page, step) for page in live.values())

    def _note_secured(self, step: int, place: str) -> None:
        self.secured[step] = place
        self.gate.stage(SECURING, step)

    def _is_overtaken(self, step: int, planned: bool) -> bool:
        """True if a live rank is past ``step`` and has no copy of it; if nobody has died, a copy is no reason to stay.

        First they all must have learned of the fault. Ranks of other nodes count if nobody has died: a node may go, and
        take its copy along.
        """
        self.peers.wait_until_told(afar=planned)
        past = {rank for rank, page in self.peers.live().items() if _is_past(page, step)}
        return bool(past) or self.peers.are_past_afar(step) if planned else bool(past - self.peers.holding(step))

    def _wait_for_storage(self, step: int, end: float) -> None:
        """Return when storage has this node's part of the step, or never will, because a rank ended without it.

        The other nodes' parts are theirs to bring: nobody here could do more for them. Of a part that went straight to
        storage nobody tells whether others follow: they get a moment, and the last one publishes the step.
        """
        if self.secured[step] == MEMORY:
            self.securer.ask_storage(step)  # a snapshot from before the fault need not be meant for it
        else:
            end = min(end, time.monotonic() + _TOGETHER)
        while time.monotonic() < end and not (self.securer.is_brought(step) or self.securer.is_durable(step)):
            live = self.peers.live()
            over = [page for rank, page in self.peers.all().items() if page.stage > SECURING or rank not in live]
            if any(page.secured != step for page in over):
                log.warning("not all ranks have step %d: the agent sends what they all have once they are gone", step)
                return
            time.sleep(_POLL)


def _is_past(page: Status, step: int) -> bool:
    return page.step > step or (page.step == step and page.phase != STABLE)
