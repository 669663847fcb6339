"""Completes one snapshot while training goes on: copies the rest, commits it, and detects changes made meanwhile."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

from rekindle.common.flag import Flag
from rekindle.devices.table import enter
from rekindle.errors import RekindleError, UsageError
from rekindle.format.lineage import ShardId
from rekindle.format.receipt import Receipt
from rekindle.memory.slot import Slot
from rekindle.memory.slots import Slots
from rekindle.save.copy import Copying
from rekindle.save.fence import some_of
from rekindle.save.plan import CopyPlan

__all__ = ["Changed", "PendingSnapshot"]


_LONGEST_WRITE = 2.0
"""Seconds for which a write to a tensor may outlast the copy of everything."""
_PEEK = 0.0002, 0.005
"""Seconds between two looks at what the trainer is doing: at first, doubled each time, and at most."""

_WAITING = {"threading", "rekindle.common.flag", "torch.autograd.graph", "torch.distributed.distributed_c10d"}
"""Modules in which the trainer waits, for somebody or for a backward pass: it may take long, or not end at all."""


class Changed(UsageError):
    """Tensors were changed after ``step()`` by something that no fence stands before. ``names`` lists them.

    ``counted``: True if torch has counted the writes, so that these are all.
    """

    def __init__(self, step: int, names: Collection[str], *, counted: bool) -> None:
        self.names, self.counted = names, counted
        super().__init__(
            f"{some_of(names)}: changed between ckpt.step({step}) and the optimizer's next step(), by something else "
            "than that step(): do it before ckpt.step(), or inside of 'with ckpt.updating():'"
        )


@dataclass
class PendingSnapshot:
    """One snapshot, from the moment at which ``step()`` returns until it is committed. Safe to use from any thread."""

    stamp: ShardId
    plan: CopyPlan
    values: bytes
    slot: Slot
    slots: Slots
    copying: Copying
    verify: bool = False
    """True if what is changed between the copy and the update is to be found as well."""
    counts: Callable[[int], bool] = lambda step: True
    """Returns True if what devices have made of a step may be committed, though a fault may have been noticed."""
    checksums: list[str] = field(default_factory=list)
    committed: bool = False
    seconds: float | None = None
    """Time from here to its commit; None while it isn't committed."""
    error: BaseException | None = None
    """The first thing that went wrong."""

    def __post_init__(self) -> None:
        self._began = time.perf_counter()
        self._versions = self._count_writes()
        self._trainer = threading.get_ident()
        self._update_waited = False
        """True once an update has asked to begin."""
        self._checked = Flag()
        self._ended = False
        """True once it is committed, or never will be."""
        self._over = Flag()
        self._checking, self._committing = threading.Lock(), threading.Lock()
        self._deciding = threading.Lock()
        """Held by who commits the slot or gives it up."""

    def _count_writes(self) -> list[int]:
        """Torch's counters of writes to the tensors that must stay as they are."""
        return [tensor._version for tensor in self.plan.watched.values()]

    def complete_in_background(self) -> None:
        """Copy and commit all that is left, in the thread that runs beside training."""
        try:
            self.copying.queue()
            self.copying.help()
        finally:
            self.commit()

    def wait_before_update(self) -> None:
        """Return when the state may change: on the host, once the snapshot is committed. Doesn't raise."""
        first, self._update_waited = not self._update_waited, True
        self.copying.note_update()
        if self._ended and not (first and self.verify):
            return
        try:
            self.copying.hold_update()
            self.check_unchanged()
            if first and self.verify:  # optimizers update one after the other: only the first finds all as it was
                self.copying.look_at_update()
        except Exception as error:
            self.error = self.error or error
        if self.copying.holds_all:
            self.commit()

    def commit(self) -> None:
        """Wait for the copy and commit it, once. Doesn't raise: ``error`` tells what went wrong."""
        if threading.get_ident() == self._trainer:  # which is here, so none of its writes is under way
            self.check_unchanged()
        with self._committing:
            if self._ended:
                return
            try:
                self.checksums = self.copying.finish()
                self._wait_for_writes()
                self.check_unchanged()
                self._require_unchanged(self.copying.changed())
                if self.error is not None:
                    raise self.error
                if not self.counts(self.stamp.step):
                    raise RekindleError("devices came to its end after a fault, which may have made it worthless")
                with self._deciding:
                    if self.slot.lost:
                        raise RekindleError("its copy took too long after a fault, and was given up")
                    self.slots.commit(self.slot, self.stamp, self.receipt())
                    self.committed, self.seconds = True, time.perf_counter() - self._began
            except Exception as error:
                self.error = self.error or error
            except BaseException:  # it is raised to this caller only; later ones see an error
                self.error = RekindleError("the save was interrupted")
                raise
            finally:
                self._ended = True
                self._over.set()

    def commit_while_moving(self, patience: float) -> None:
        """Commit it as ``commit`` does, but return once nothing more was copied for ``patience`` seconds.

        Another thread commits, for any call on a device that is stuck may not return.
        """
        if not self._over.is_set():
            with suppress(RuntimeError):  # no more threads can be started: the one that runs beside training commits
                threading.Thread(target=self._commit_aside, name="rekindle-commit", daemon=True).start()
        left = self.copying.left
        while not self._over.wait(patience) and left != self.copying.left:
            left = self.copying.left

    def _commit_aside(self) -> None:
        enter(self.plan.devices)
        self.commit()

    def give_up(self) -> None:
        """Have it never be committed, unless it is. Its copy may still land in the slot, which nobody gets again."""
        with self._deciding:
            self.slot.lost = not (self.committed or self._ended)
        self._over.set()

    def wait(self, timeout: float) -> bool:
        """Returns True once it is committed, False when it can't be, or isn't within ``timeout`` seconds."""
        self._over.wait(timeout)
        return self.committed

    def _wait_for_writes(self) -> None:
        """Return when a write that began during the copy is over: torch counts it then, and not before.

        It is over once the trainer has gone on from the line where it is now. Waits that take it longer than any write,
        such as for other ranks, are not waited for.
        """
        if self._checked.is_set():
            return
        place, deadline = _find_place(self._trainer), time.monotonic() + _LONGEST_WRITE
        pause, longest = _PEEK
        while place is not None and place == _find_place(self._trainer) and time.monotonic() < deadline:
            if self._checked.wait(pause):
                return
            pause = min(2 * pause, longest)

    def check_unchanged(self) -> None:
        """Compare torch's counters of writes with those of the start; a difference becomes the ``error``.

        Done once, before the first update: by the trainer, or while nothing changes the state. Writes that pass by the
        counters are found by the copy's witness.
        """
        with self._checking:
            if not self._checked.is_set():
                pairs = zip(self.plan.watched, self._versions, self._count_writes(), strict=True)
                names = {name for name, before, after in pairs if before != after}
                if names:
                    self.error = self.error or Changed(self.stamp.step, names, counted=True)
                self._checked.set()

    def _require_unchanged(self, changed: Collection[str]) -> None:
        if changed:
            raise Changed(self.stamp.step, changed, counted=False)

    def conclude(self) -> None:
        """Commit it, and find what was changed until the update. Doesn't raise: ``error`` tells what went wrong."""
        self.commit()
        try:
            self._require_unchanged(self.copying.changed_later())
        except Exception as error:
            self.error = self.error or error

    def receipt(self) -> bytes:
        """Returns the encoded receipt of a copy that is complete."""
        return Receipt.encode(self.stamp, self.plan.static, self.checksums, self.values)


def _find_place(thread: int) -> tuple[int, int] | None:
    """Returns where another thread is in code other than torch's; None if it is where nothing writes to a parameter.

    That place stays the same until a call into torch returns, whatever Python that runs: compiled code, dispatch.
    """
    frame = sys._current_frames().get(thread)
    if frame is not None and frame.f_globals.get("__name__") in _WAITING:
        return None
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
        frame = frame.f_back
    return None if frame is None else (id(frame), frame.f_lasti)
