"""Captures what only this rank has of a step, at each step's end: for its successor, and for its own last save."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from rekindle.devices.events import Event, record
from rekindle.devices.streams import copy_now
from rekindle.devices.table import backend_of, device_of, has_queues, is_host, on_host
from rekindle.errors import RekindleError
from rekindle.format.lineage import ShardId
from rekindle.memory.local_state import LocalStateWriter, padded
from rekindle.save.plan import Batch, CopyPlan, Unit, in_batches
from rekindle.save.progress import KEPT, DeviceClock
from rekindle.save.witness import PLACES, Look, Witness

__all__ = ["KeptStep", "LocalStateCapture"]

_LARGE = 1 << 20
"""Bytes of the largest tensor that is taken at each step: a frozen model would cost more than training it. Larger ones
can be secured as long as they are not written to between the step's end and the fault."""
_FIRST, _EVERY = 2, 64
"""Steps at which devices are looked at until the update: the first ones, and one in so many."""
_END, _UPDATE, _NOW = range(PLACES)
"""Places of looks."""
_LOOK = 1.0
"""Seconds after which a thread that waits for a device looks for a fault."""


class KeptStep:
    """Local state of one step. ``take`` fills it, again and again.

    Small tensors are copied if the next step may change them before its update. Where the state is on devices, so are
    those that the host updates, such as an optimizer's counters: the host may be a step ahead of what the devices hold.
    """

    def __init__(self, plan: CopyPlan) -> None:
        self._plan, self.values = plan, b""
        self.stamp: ShardId | None = None
        """The step; None while it is being taken."""
        self.events: dict[torch.device, Event] = {}
        """Events that tell when a device has come to the step's end, and to that of the copies."""
        self._changed: list[str] | None = None
        """Tensors that were changed before the update that came next; None until one has come."""
        self.writing: Future[object] | None = None
        """The writing to a file, which reads what ``take`` overwrites."""
        plan = plan.whole
        self.devices = plan.devices
        early = list(_units(plan.early))
        by_host = [unit for unit in _units(plan.late) if on_host(unit.source)] if self.devices else []
        self.taken = [unit for unit in early if _small(unit)]  # each a whole tensor
        self.announced = False
        """True if the update that made the step was announced, with all that it changed."""
        self._left = [unit for unit in early if not _small(unit)]
        lasts = [*_units(plan.late), *self._left]
        suits = has_queues if self.devices else is_host
        self._witness = Witness(unit for unit in lasts if suits(device_of(unit.source)))
        self._at_end: Look | None = None
        """Look at the step's end."""
        self._at_update: Look | None = None
        self._offloaded = [unit for unit in by_host if not _small(unit)]
        self._lay_out(self.taken, [unit for unit in by_host if _small(unit)])

    def _lay_out(self, told: list[Unit], untold: list[Unit]) -> None:
        """Give each small tensor its place: first those that the file tells of."""
        size = sum(padded(unit.nbytes) for unit in told + untold)
        backend = backend_of(next(iter(self.devices))) if self.devices else None
        self._body = backend.pinned(size) if backend is not None else torch.empty(size, dtype=torch.uint8, device="cpu")
        self._told_bytes = sum(padded(unit.nbytes) for unit in told)
        self._copies: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        """Places and tensors by device."""
        self._pieces: dict[int, torch.Tensor] = {}
        """Places by ``id`` of the tensor: views of one memory may have the same address and length in another order."""
        at = 0
        for unit in told + untold:
            piece = self._body[at : at + unit.nbytes]
            places, sources = self._copies.setdefault(device_of(unit.source), ([], []))
            places.append(piece.view(unit.source.dtype).view(unit.source.shape))
            sources.append(unit.source)
            self._pieces[id(unit.source)] = piece
            at += padded(unit.nbytes)

    def fits(self, plan: CopyPlan) -> bool:
        """Returns True if it can be taken by ``plan``."""
        return plan is self._plan

    def take(self, stamp: ShardId, values: bytes, *, look: bool) -> None:
        """Copy what is the state of ``stamp`` now. ``look`` at the rest that is on devices; the host's always is."""
        self.stamp = self._at_end = self._at_update = None
        copied = {device: copy_now(device, *sides) for device, sides in self._copies.items()}
        self.events = {device: copied.get(device) or record(device) for device in self.devices}
        self._versions = [_version(unit.counter) for unit in self._left]
        self._late = [tensor._version for tensor in self._plan.whole.watched.values()]
        self._changed = None
        if look or not self.devices:
            self._at_end = self._witness.look(_END, whole=False)
        self.values, self.stamp = values, stamp

    def end(self) -> None:
        """Note that the host is about to update the state. What it changes from now on, devices change later."""
        if self._changed is None:
            self._changed = self._changed_late()
            if self._at_end is not None:
                with suppress(RekindleError):  # memory has moved
                    self._at_update = self._witness.look(_UPDATE, whole=False)

    def changed_unseen(self) -> set[str]:
        """Returns what was changed from the step's end to the update that came next, though torch has counted nothing.

        Not before the devices are past that update's beginning.
        """
        if self._at_end is None or self._at_update is None or self._changed:
            return set()
        return self._names(self._at_update)

    def _names(self, later: Look) -> set[str]:
        assert self._at_end is not None
        return {self._plan.whole.layout.tensor_of(unit.block) for unit in later.differing(self._at_end)}

    def check(self) -> None:
        """Raises RekindleError if something that was not copied has been changed since the step's end."""
        changed = self._changed_late() if self._changed is None else self._changed
        if not changed and not self.devices and self._at_end is not None:
            changed = sorted(self._names(self._witness.look(_NOW, whole=False)))
        if changed:
            raise RekindleError(f"{changed[0]} has been changed since the end of step {self._step}")
        versions = zip(self._left, self._versions, strict=True)
        left = [u for u, before in versions if before is None or u.counter._version != before]
        if self._changed is not None:
            left += self._offloaded
        if left:
            at = self._plan.whole.layout.tensor_of(left[0].block)
            may = "may have" if left[0].counter.is_inference() else "has"
            raise RekindleError(
                f"{at} {may} been changed since the end of step {self._step}, and is too large to be kept at each step"
            )

    @property
    def _step(self) -> int:
        return self.stamp.step if self.stamp is not None else -1

    def _changed_late(self) -> list[str]:
        """Returns tensors that should last until the next update, but have been written to since ``take``."""
        pairs = zip(self._plan.whole.watched.items(), self._late, strict=True)
        return [name for (name, tensor), before in pairs if tensor._version != before]

    def wait(self, given_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the devices have come to the step's end, however long they are busy. Returns False if given up.

        Raises RuntimeError when a device has failed.
        """
        for event in self.events.values():
            while not event.wait(_LOOK):
                if given_up():
                    return False
        return True

    @property
    def told(self) -> memoryview:
        """Bytes for the file."""
        return memoryview((ctypes.c_char * self._told_bytes).from_address(self._body.data_ptr()))

    def plan(self, *, whole: bool) -> CopyPlan:
        """Returns a plan of where the step's bytes are now: copied ones in the copy, others where they live.

        With ``whole`` of all that this rank holds, else of its part.
        """
        plan = self._plan.whole if whole else self._plan
        return replace(plan, early=self._redirect(plan.early), late=self._redirect(plan.late))

    def _redirect(self, batches: list[Batch]) -> list[Batch]:
        return in_batches(map(self._where_it_is, _units(batches)))

    def _where_it_is(self, unit: Unit) -> Unit:
        piece = self._pieces.get(id(unit.source))
        return unit if piece is None else Unit(piece, piece.data_ptr(), unit.start, unit.nbytes, unit.block, piece)


def _units(batches: Iterable[Batch]) -> Iterator[Unit]:
    return (unit for batch in batches for unit in batch.units)


def _version(tensor: torch.Tensor) -> int | None:
    """Returns torch's counter of writes to a tensor; None for one of inference mode, of which torch counts none."""
    return None if tensor.is_inference() else tensor._version


def _small(unit: Unit) -> bool:
    return unit.source.nbytes <= _LARGE


class LocalStateCapture:
    """Keeps the values, generators and small tensors of the newest steps, and writes them to files.

    ``take`` and ``store`` are for the thread that trains, ``find`` for any.
    """

    def __init__(
        self,
        file: LocalStateWriter | None,
        behind: Callable[[Callable[[], object]], Future[object]],
        clock: DeviceClock,
        found: Callable[[int, Collection[str]], object],
    ) -> None:
        """``found`` is called with what was changed after a step before an update was announced."""
        self._file, self._behind, self._clock, self._found = file, behind, clock, found
        self._taken = 0
        self._kept: deque[KeptStep] = deque()
        self._spare: list[KeptStep] = []
        """Those of the same plan that hold no step yet, or none any more."""
        self._plan: CopyPlan | None = None
        self._told: CopyPlan | None = None
        """Plan that the file has."""

    def take(self, stamp: ShardId, plan: CopyPlan, values: bytes) -> KeptStep:
        """Keep what is the state of ``stamp`` now. Waits until the devices are past what has to go for it."""
        kept = self._make_room(plan)
        kept.take(stamp, values, look=self._taken < _FIRST or self._taken % _EVERY == 0)
        self._taken += 1
        self._kept.append(kept)
        self._plan = plan
        return kept

    def _make_room(self, plan: CopyPlan) -> KeptStep:
        if plan is not self._plan:
            self._spare = []
        if self._kept and len(self._kept) >= (KEPT if self._kept[0].devices else 1):
            oldest = self._kept[0]
            if len(self._kept) > 1:
                self._kept[1].wait()
                if oldest.stamp is not None and (names := oldest.changed_unseen()):
                    self._found(oldest.stamp.step, names)
            if oldest.writing is not None:
                oldest.writing.exception()
            self._kept.popleft()
            self._spare += [oldest] if oldest.fits(plan) else []
        if not self._spare:  # all at once: beside a device that is stuck no memory is to be page-locked
            first = KeptStep(plan)
            self._spare = [first, *(KeptStep(plan) for _ in range(KEPT - 1) if first.devices)]
        return self._spare.pop()

    def store(self, kept: KeptStep, plan: CopyPlan) -> None:
        """Write the newest step to its file. Raises OSError when memory is full, which hurts no earlier save.

        Where devices are behind, another thread waits for them and writes; a later call raises its error.
        """
        if self._file is None:
            return
        if not kept.devices:
            self._write(self._file, kept, plan.whole)
            return
        over = [one for one in self._kept if one.writing is not None and one.writing.done()]
        errors = [one.writing.exception() for one in over if one.writing is not None]
        for one in over:
            one.writing = None
        kept.writing = self._behind(partial(self._write, self._file, kept, plan.whole))
        for error in filter(None, errors):
            raise error

    def _write(self, file: LocalStateWriter, kept: KeptStep, plan: CopyPlan) -> None:
        stamp = kept.stamp
        assert stamp is not None
        if not (kept.wait(lambda: self._clock.frozen) and self._clock.counts(stamp.step)):
            return  # this rank saves the step itself, or nobody does
        told, self._told = self._told, None  # should this fail, the files may be gone, plan and all
        if told is not plan:
            file.set_plan(stamp, plan.static, [unit.block for unit in kept.taken], plan.replicas)
        file.write(stamp, kept.values, kept.told)
        self._told = plan

    def find(self, step: int) -> KeptStep:
        """Returns what is kept of ``step``. Raises RekindleError when that is nothing."""
        steps = {kept.stamp.step: kept for kept in list(self._kept) if kept.stamp is not None}
        if step not in steps:
            older = bool(steps) and step < min(steps)
            why = "its local state is not kept any more" if older else "it was not told to ckpt.step()"
            raise RekindleError(f"step {step} has been completed, but {why}")
        return steps[step]

    def end_newest(self) -> None:
        """Note that the host is about to update the state."""
        if self._kept:
            self._kept[-1].end()

    @property
    def stamp(self) -> ShardId | None:
        """The newest step kept; None if there is none."""
        return self._kept[-1].stamp if self._kept else None

    @property
    def alone(self) -> list[str]:
        """Tensors that no other rank is known to have, but the small ones, whose copies outlive this rank."""
        plan = self._plan
        if plan is None:
            return []
        me = {self.stamp.rank} if self.stamp is not None else set()
        updated = [name for name in plan.watched if not set(plan.replicas.get(name, ())) - me]
        return updated + [plan.layout.tensor_of(unit.block) for unit in _units(plan.early) if not _small(unit)]

    @property
    def shared(self) -> bool:
        """True if other ranks of the node copy a part of what this one holds."""
        return self._plan is not None and self._plan.whole is not self._plan
