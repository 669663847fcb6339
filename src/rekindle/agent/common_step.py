"""Agrees with the other nodes on one step at a time that all of them keep: a state machine without clock or threads.

The lowest-numbered node that is there names the *common step*. Each node keeps its snapshot of it, copies what the loss
of another node would take along, and says so: its bit in a mask. Beats tell masks on, so a node need not hear all
others. Once all bits are set the step is *safe* from the loss of any node, and the next one is named.

A node whose bit is set keeps the step until it is safe, or a later round has been heard of for a while: by then nobody
can find all bits set any more. So no node calls a step safe that another one has let go.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from rekindle.format.fields import check_integer

__all__ = ["NOTHING_TOLD", "CommonStep", "Own", "Told"]

_AHEAD = 0.5
"""Seconds of steps by which the common step is named ahead: all nodes hear of it before they would recycle it."""
_UNREACHED = 2.0
"""Seconds without it after which a step that was named ahead is replaced by the newest one: training stands still."""
_SKIPPED = 2.0
"""Seconds after a later step in which the leader replaces a common step that has no snapshot; then it has failed."""
_STALLS = 30.0
"""Seconds without a byte after which a node gives up a common step."""
_PATIENCE, _MOST_DOUBLED = 30.0, 6
"""Seconds that the leader waits for all bits; twice as long after each time that was too short, so many times. A state
of 100 GB takes a quarter of an hour over 1 Gb/s. Storage gets no newer step meanwhile."""
_APART_EVERY = 100
"""Interval in steps of those that are named while a node is missing: no step can be safe, and nodes that don't hear
each other must choose the same ones for storage."""
_GRACE = 3.0
"""Seconds that a step is kept after it was given up. A beat takes milliseconds, on a broken link 1 or 2 s."""
_STOPPED = 1.5
"""Seconds between two ticks after which this node was stopped: what it has heard is old."""
_DEAF = 1.0
"""Seconds for which it believes nobody's masks then: beats that have waited for it are read first."""
_LONGEST_MASK = (1 << 16) // 4
"""Hexadecimal digits of a mask, at most."""


class Told(NamedTuple):
    """One node's word on the common step, as its beats carry it. Steps are -1 for none."""

    round: int = 0
    """Number of the naming. A later round replaces an earlier one, whatever its step."""
    step: int = -1
    have: int = 0
    """Mask of the nodes that keep the step, and what their sources would lose of it."""
    failed: bool = False
    """True if some node will never have it."""
    safe: int = -1
    """Newest step that is safe."""
    drain: int = -1
    """Newest step that is marked for storage."""
    wanted: int = -1
    """Newest step that somebody waits to be safe."""

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "have": f"{self.have:x}"}

    @staticmethod
    def from_json(value: Any) -> Told:
        """Reads a word from JSON. Raises ValueError, TypeError or KeyError when a field is missing or malformed."""
        have, failed = value["have"], value["failed"]
        if type(failed) is not bool or type(have) is not str or len(have) > _LONGEST_MASK:
            raise ValueError("the word on a common step is malformed")
        steps = {name: check_integer(value[name], -1) for name in ("step", "safe", "drain", "wanted")}
        mask = check_integer(int(have, 16), 0, 1 << 4 * len(have))
        return Told(round=check_integer(value["round"]), have=mask, failed=failed, **steps)


NOTHING_TOLD = Told()


class Own(NamedTuple):
    """Facts of one node. Steps are those of the present start."""

    steps: Collection[int] = ()
    """Steps of which all of its ranks have snapshots."""
    kept: Collection[int] = ()
    """Those of them of which it also has the copies that are its task."""
    failed: bool = False
    """True if the step of the present round can't be copied, or not be kept for long."""
    moved: float = -math.inf
    """Time of the last byte that was copied."""
    wanted: int = -1
    """Step that somebody on this node waits to be safe."""

    @property
    def newest(self) -> int:
        return max(self.steps, default=-1)


class CommonStep:
    """The common step, as one node knows it. All times are seconds of one clock. For one thread at a time."""

    def __init__(
        self, own: int, present: Collection[int], *, copies: bool, every: int = 1, former: Told = NOTHING_TOLD
    ) -> None:
        """``present`` are the numbers of the nodes in the mesh.

        Without ``copies`` no step is ever safe: common steps serve storage alone, and are named when one is due there.
        Else they are multiples of ``every``. ``former`` is what an agent before this one has left.
        """
        self._bit, self._all = 1 << own, sum(1 << node for node in present)
        self._copies, self._every = copies, every
        self._told = former
        self._own = Own()
        self._named = self._ticked = -math.inf
        """Time at which this node heard of the present round; that of the last tick."""
        self._reached: float | None = None
        """Time at which this node first had the step, or a later one."""
        self._leave = math.inf
        """Time until which the step is kept though it was given up, or a later round has been heard of."""
        self._deaf = -math.inf
        """Time until which no masks are believed."""
        self._too_short = 0
        """Times in a row that the leader's patience was over before all bits were set."""
        self._seen: deque[tuple[float, int]] = deque()
        """Newest steps of the last moments, with their times."""

    @property
    def told(self) -> Told:
        """The word for the next beat."""
        return self._told

    @property
    def is_open(self) -> bool:
        """True if this node is to see that it has the step and its copies."""
        return self._copies and self._told.step > self._told.safe and not self._told.failed

    @property
    def is_promised(self) -> bool:
        """True while other nodes count on this one to keep the step, or soon may."""
        told = self._told
        pending = not told.failed or (bool(told.have & self._bit) and self._ticked < self._leave)
        return self._copies and told.step > told.safe and pending

    def tick(
        self, own: Own, now: float, heard: Iterable[Told] = (), *, leads: bool, calm: bool = True, due: bool = False
    ) -> None:
        """Notes the facts of this node and what others have told since the last tick. To be called at each beat.

        ``leads`` is True on the lowest-numbered node that is there, ``calm`` if no node is missing, ``due`` if storage
        should get a step.
        """
        if now - self._ticked > _STOPPED and self._ticked > -math.inf:
            self._deaf = now + _DEAF
            self._told = self._told._replace(have=self._told.have & self._bit)
        self._ticked, self._own = now, own
        self._told = self._told._replace(wanted=max(self._told.wanted, own.wanted))
        self._see(now)
        for other in heard:
            self._hear(other if now >= self._deaf else other._replace(have=0), now)
        self._conclude(now)
        if leads:
            self._lead(now, calm=calm, due=due)
            self._conclude(now)

    # -- as any node ----------------------------------------------------------------------------------------------

    def _hear(self, other: Told, now: float) -> None:
        mine = self._told
        safe = other.safe if other.safe in self._own.kept else -1  # else the own safe step would be let go for nothing
        self._told = mine = mine._replace(
            safe=max(mine.safe, safe), drain=max(mine.drain, other.drain), wanted=max(mine.wanted, other.wanted)
        )
        if (other.round, other.step) == (mine.round, mine.step):
            self._told = mine._replace(have=mine.have | other.have & self._all & ~self._bit)
            if other.failed:
                self._fail(now)
        elif (other.round, other.step) > (mine.round, mine.step):
            if other.step == mine.step and not other.failed:  # a new agent's: it keeps the step as the one before did
                self._begin(other, now)
                self._told = self._told._replace(have=self._told.have | mine.have & self._bit)
            elif self._lets_go(now):
                self._begin(other, now)

    def _begin(self, told: Told, now: float) -> None:
        """Turns to another round."""
        self._told = self._told._replace(
            round=told.round, step=told.step, have=told.have & self._all & ~self._bit, failed=told.failed
        )
        self._named, self._reached = now, None
        self._leave = now + _GRACE if told.failed else math.inf

    def _lets_go(self, now: float) -> bool:
        """True if this node may turn to a later round: the step is safe, or nobody counts on this node's bit."""
        if not self._told.have & self._bit or self._told.step <= self._told.safe:
            return True
        self._leave = min(self._leave, now + _GRACE)
        return now >= self._leave

    def _fail(self, now: float) -> None:
        """Notes that the step will not be safe, unless all bits are set already."""
        if not self._told.failed:
            self._told = self._told._replace(failed=True)
            self._leave = min(self._leave, now + _GRACE)

    def _conclude(self, now: float) -> None:
        """Sets the own bit, or gives the step up; finds that it is safe."""
        own, told = self._own, self._told
        if self._reached is None and 0 <= told.step <= own.newest:
            self._reached = now
        if not told.failed and told.step > told.safe and self._reached is not None:
            missing = not told.have & self._bit
            if own.failed or (missing and told.step not in own.kept and self._is_missed(now, self._reached)):
                self._fail(now)
            elif missing and told.step in own.kept:
                self._told = told = told._replace(have=told.have | self._bit)
        if self._copies and told.have == self._all and told.step > told.safe and told.step in own.kept:
            self._told, self._too_short = self._told._replace(safe=told.step), 0

    def _is_missed(self, now: float, reached: float) -> bool:
        if self._told.step not in self._own.steps:
            return now - reached > _SKIPPED
        return self._copies and now - max(reached, self._own.moved) > _STALLS

    # -- as the node that names the steps -------------------------------------------------------------------------

    def _lead(self, now: float, *, calm: bool, due: bool) -> None:
        told = self._told
        due = due or not (calm or told.step % _APART_EVERY)
        if due and told.step > told.drain and told.step in self._own.steps:
            self._told = told = told._replace(drain=told.step)
        step = None
        if told.step <= self._floor or (told.failed and now >= self._leave):
            if not calm:
                self._name_for_storage(now)
                return
            step = self._next(now, due=due)
        elif told.failed:
            return
        elif self._reached is None:
            step = self._instead(now)
        else:
            step = self._exact()
            if step is None and now - self._reached > _PATIENCE * 2 ** min(self._too_short, _MOST_DOUBLED):
                self._too_short += calm  # else it is not the copies that take so long
                self._fail(now)
        if step is not None:
            self._begin(Told(told.round + 1, step), now)

    def _name_for_storage(self, now: float) -> None:
        """Names a step that other leaders name too, on nodes that this one doesn't hear: nobody copies it."""
        told, newest = self._told, self._own.newest
        if newest >= 0 and (not told.failed or told.step <= told.drain or told.step < newest):
            self._begin(Told(told.round + 1, (newest // _APART_EVERY + 1) * _APART_EVERY, failed=True), now)
            self._leave = now  # no bit of it is out

    @property
    def _floor(self) -> int:
        """Newest step that needs no round any more."""
        return self._told.safe if self._copies else self._told.drain

    @property
    def _awaited(self) -> int | None:
        """Step that somebody waits to be safe, and can be: training may stand still until it is."""
        wanted = self._told.wanted
        return wanted if self._copies and wanted > self._told.safe and wanted in self._own.steps else None

    def _next(self, now: float, *, due: bool) -> int | None:
        """Returns the step to name after one that is settled; None if there is nothing new to be kept."""
        newest = self._own.newest
        if newest <= self._floor:
            return None
        if self._awaited is not None:
            return self._awaited
        ahead = self._ahead(now)
        if ahead is None or not (self._copies or due):
            return None
        return self._multiple(newest + ahead)

    def _instead(self, now: float) -> int | None:
        """Returns the step to name in place of one that training has not reached; None to wait for it."""
        if self._awaited is not None or now - self._named <= _UNREACHED:
            return self._awaited
        there = (step for step in self._own.steps if step > self._floor and step == self._multiple(step))
        return max(there, default=None)

    def _exact(self) -> int | None:
        """Returns the step to name in place of one that has no snapshot; None if it has one, or there is no better."""
        later = [step for step in self._own.steps if step > self._told.step]
        if self._told.step in self._own.steps or not later:
            return None
        step = self._multiple(min(later))
        return step if step in later or step > max(later) else None

    def _multiple(self, step: int) -> int:
        return -(-step // self._every) * self._every if self._copies else step

    def _see(self, now: float) -> None:
        """Notes the newest step: one note is from before the time that counts."""
        if self._own.steps:
            self._seen.append((now, self._own.newest))
        while len(self._seen) > 1 and self._seen[1][0] <= now - _AHEAD:
            self._seen.popleft()

    def _ahead(self, now: float) -> int | None:
        """Returns the steps that training makes while all nodes hear of a name; None if that isn't known yet.

        They are none where a snapshot outlasts that time.
        """
        began, oldest = self._seen[0]
        if now - began < _AHEAD:
            return None
        steps = self._own.newest - oldest
        few = len({newest for _, newest in self._seen}) < 3
        return 0 if few else math.ceil(max(0, steps) * _AHEAD / (now - began))
