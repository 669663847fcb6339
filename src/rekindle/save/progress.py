"""Tells by events which step's state the devices hold: the host, which queues their work, is ahead of them.

Each device passes an event when it begins an update, and another at the step's end, behind the copies of what the
next step changes first. After a fault these events decide which step can be read, however far the host has come.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from rekindle.devices.events import Event, record
from rekindle.devices.table import Entrance
from rekindle.errors import RekindleError

__all__ = ["KEPT", "DeviceClock", "Progress", "StateMoved", "standing_step"]

KEPT = 4
"""Newest steps that are told apart. The host waits before it gets further ahead of the devices than these: so each step
that a device may stand at has its local state in memory. Each costs page-locked memory for its small tensors."""


class StateMoved(RekindleError):
    """A device has begun the next update while the state was being read: what was read is of no step."""


class Progress(NamedTuple):
    """Holds how far the devices have come with one step."""

    step: int
    begun: bool
    """True if a device has begun the update that makes the step."""
    ended: bool
    """True if all devices have come to the step's end, and that counts."""


def standing_step(progress: Sequence[Progress]) -> int | None:
    """Returns the step whose state the devices hold, from the progress of steps in order.

    None while an update is under way, or if one has ended in a way that doesn't count.
    """
    begun = [one for one in progress if one.begun]
    return begun[-1].step if begun and begun[-1].ended else None


@dataclass(frozen=True)
class _Mark:
    """Events of one step, by device. Methods raise RuntimeError when a device has failed."""

    step: int
    """The step told, or that the update would make that nothing was told of yet."""
    made: int
    """Step that the first update since the step before makes. Others followed it if ``step`` is a later one."""
    begins: Mapping[torch.device, Event] = field(default_factory=dict)
    """Before the first update since the step before."""
    others: Mapping[torch.device, Event] = field(default_factory=dict)
    """Before the newest of those that followed it; empty if none has."""
    ends: Mapping[torch.device, Event] = field(default_factory=dict)

    def begun(self) -> bool:
        """Returns True if any device has begun the first update."""
        known = self.begins or self.ends  # an update may go unannounced
        return any([event.reached() for event in known.values()])

    def begun_on_all(self) -> bool:
        """Returns True if all devices have begun the newest update."""
        known = self.others or self.begins or self.ends
        return bool(known) and all([event.reached() for event in known.values()])

    def ended(self) -> bool:
        """Returns True if all devices have come to the step's end."""
        return bool(self.ends) and all([event.reached() for event in self.ends.values()])

    def decided(self) -> bool:
        """Returns True if no collective stands before the step's end any more, for any device.

        That is so once the last update has begun. If the step's number tells of more updates than one, some may have
        gone unannounced.
        """
        return self.ended() or (self.made == self.step and self.begun_on_all())


class DeviceClock:
    """Keeps the events of the newest steps. Records nothing while the state is on no device. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget all steps: a guarded part of training begins. For the thread that trains."""
        with self._lock:
            # One for each step told, however many updates it takes; of the newest an update may be all there is.
            self._marks: deque[_Mark] = deque(maxlen=KEPT + 1)
        self._devices: list[torch.device] = []
        self._limit = math.inf
        """Newest step whose end counts."""
        self._seen = -1
        """Newest step whose update had begun on all devices when a fault was noticed."""
        self.frozen = False
        """True once a fault was noticed."""
        self._entrance = Entrance()

    @property
    def in_use(self) -> bool:
        """True if the state is on devices, which decide on what stands."""
        return bool(self._devices)

    # -- for threads that train ---------------------------------------------------------------------------------

    def begin_update(self, step: int) -> None:
        """Queue the event that tells of the update which makes ``step``: all that changes the state comes behind."""
        if self._devices:
            self._mark(step, begins={device: record(device) for device in self._devices})

    def update_again(self) -> None:
        """Queue the event that tells of one more update before the step's end, as of a second optimizer.

        Its gradients may come from a collective that stands behind the updates before. So if a fault has been noticed,
        the step no longer counts as one whose last update had begun.
        """
        if not self._devices:
            return
        others = {device: record(device) for device in self._devices}
        with self._lock:
            newest = self._marks[-1] if self._marks else None
            if newest is None or newest.ends:
                return
            self._marks[-1] = replace(newest, others=others)
            if self.frozen:
                self._seen = min(self._seen, newest.step - 1)
                self._limit = self._limit if math.isinf(self._limit) else min(self._limit, self._seen)

    def end_step(self, step: int, events: Mapping[torch.device, Event]) -> None:
        """Note the events that tell of the end of ``step``, one for each device. None: the state is on the host."""
        self._devices = list(events)
        if events:
            self._mark(step, ends=events)
        elif self._marks:
            self.reset()

    def _mark(self, step: int, **events: Mapping[torch.device, Event]) -> None:
        """Add to the newest mark, if it is that of ``step`` or has no end yet; else begin one.

        Marks are replaced, never changed: other threads look at them without the lock.
        """
        with self._lock:
            newest = self._marks[-1] if self._marks else None
            if newest is not None and (newest.step == step or not newest.ends):
                self._marks[-1] = replace(newest, step=step, **events)  # type: ignore[arg-type]
            else:
                self._marks.append(_Mark(step, made=step, **events))

    # -- after a fault ------------------------------------------------------------------------------------------

    def freeze(self, *, late: bool) -> None:
        """Note what the devices have reached at the first call: call it at the moment at which a fault is noticed.

        With ``late`` what they reach from then on counts too: all ranks live, and what is queued ends as it should.
        Else only an update does that had begun on all devices, with gradients that were complete. Any other may only
        begin because a communicator is aborted: what is queued behind a collective goes on as if that had succeeded.
        """
        self.enter()
        with self._lock:  # the thread that trains may be about to tell of one more update
            if not self.frozen:
                self._seen = _newest(_Mark.decided, self._marks)
                self.frozen = True
            if not late:
                self._limit = min(self._limit, self._seen)

    def distrust(self) -> None:
        """Let nothing count that a device reaches from now on: somebody is about to abort what it does."""
        self.enter()
        self._limit = min(self._limit, _newest(_Mark.ended, self._after(-1)))

    def standing(self) -> int | None:
        """Returns the step whose state the devices hold; None while an update is under way.

        Raises RekindleError when a device has failed.
        """
        return standing_step(self._progress())

    def awaits(self, step: int) -> bool:
        """Returns True if the end of a later step is queued on the devices, which may still come to it."""
        self.enter()
        open_ends = (mark for mark in self._after(step) if mark.ends and mark.step <= self._limit)
        return any(not _surely(_Mark.ended, mark) for mark in open_ends)

    def lost(self) -> bool:
        """Returns True if the devices have begun an update that doesn't count: no step's state will be had of them."""
        return any(one.begun and not self.counts(one.step) for one in self._progress())

    def check(self, step: int) -> None:
        """Raises StateMoved if a device has begun an update since ``step``; RekindleError when one has failed."""
        if any(one.begun for one in self._progress() if one.step > step):
            raise StateMoved(f"a device has begun the update after step {step} while that was being read")

    def counts(self, step: int) -> bool:
        """Returns True if what devices have made of ``step`` may be saved, once they have come to its end."""
        return step <= self._limit

    def _progress(self) -> list[Progress]:
        self.enter()
        try:
            return [Progress(m.step, m.begun(), m.step <= self._limit and m.ended()) for m in self._after(-1)]
        except RuntimeError as error:
            raise RekindleError(f"a device has failed, and its memory can't be read: {error}") from error

    def _after(self, step: int) -> list[_Mark]:
        with self._lock:
            return [mark for mark in self._marks if mark.step > step]

    def enter(self) -> None:
        """Make the devices the calling thread's, which is about to ask them. The one that trains has chosen its own."""
        self._entrance.enter(self._devices)


def _newest(reached: Callable[[_Mark], bool], marks: Iterable[_Mark]) -> int:
    """Returns the newest step that has surely been reached; -1 if none has."""
    return max((mark.step for mark in marks if _surely(reached, mark)), default=-1)


def _surely(reached: Callable[[_Mark], bool], mark: _Mark) -> bool:
    """Returns False also when a device has failed."""
    try:
        return reached(mark)
    except RuntimeError:
        return False
