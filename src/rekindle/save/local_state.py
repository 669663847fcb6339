"""Captures what only this rank has of a step, at each step's end: for its successor, and for its own last save."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import torch

from rekindle.devices.events import Event, record
from rekindle.devices.table import backend_of, device_of
from rekindle.errors import RekindleError
from rekindle.format.lineage import ShardId
from rekindle.memory.local_state import LocalStateWriter, padded
from rekindle.save.plan import Batch, CopyPlan, Unit

__all__ = ["LocalStateCapture"]

_LARGE = 1 << 20
"""Bytes of the largest tensor that is taken at each step: a frozen model would cost more than training it. Larger ones
can be secured as long as they are not written to between the step's end and the fault."""
_STUCK = 10.0
"""Seconds that a device gets to come to the end of its step."""


class LocalStateCapture:
    """Holds the newest step's values, generators and buffers.

    ``take`` is for the thread that trains, ``plan`` for any other one while no step is being taken.
    """

    def __init__(self, file: LocalStateWriter | None, behind: Callable[[Callable[[], object]], Future[object]]) -> None:
        self._file, self._behind = file, behind
        self._writing: Future[object] | None = None
        self.stamp: ShardId | None = None
        self.values = b""
        self.events: dict[torch.device, Event] = {}
        """Events that tell when a device has come to the end of the step."""
        self._plan: CopyPlan | None = None
        self._told = False
        """True if the file has the plan."""

    def take(self, stamp: ShardId, plan: CopyPlan, values: bytes) -> None:
        """Copy what is the state of ``stamp`` now. Raises OSError when memory is full, which hurts no earlier save."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()  # it reads what is about to be overwritten
        if plan is not self._plan:
            self._lay_out(plan)
        self.events = {device: record(device) for device in self._devices}
        with torch.no_grad():
            for view, unit in self._copied:
                view.copy_(unit.source, non_blocking=True)
        self._versions = [unit.counter._version for unit in self._left]
        self._late = [tensor._version for tensor in plan.whole.watched.values()]
        self.stamp, self.values = stamp, values
        if self._file is None:
            return
        if self._devices:  # they are behind: only another thread may wait for them
            self._writing = self._behind(partial(self._write, self._file, stamp, plan.whole))
        else:
            self._write(self._file, stamp, plan.whole)

    def _lay_out(self, plan: CopyPlan) -> None:
        self._plan, self._told = plan, False
        plan = plan.whole
        units = [unit for batch in plan.early for unit in batch.units]
        small = [unit for unit in units if unit.source.nbytes <= _LARGE]  # each a whole tensor
        self._left = [unit for unit in units if unit.source.nbytes > _LARGE]
        self._devices = {b.device for b in plan.early + plan.late if backend_of(b.device) is not None}
        size = sum(padded(unit.nbytes) for unit in small)
        self._body = torch.empty(size, dtype=torch.uint8, pin_memory=bool(self._devices))
        self._copied: list[tuple[torch.Tensor, Unit]] = []
        self._taken: list[Unit] = []
        self._pieces: dict[tuple[int, int], torch.Tensor] = {}
        """Copies of small tensors, by address and length of the tensor."""
        at = 0
        for unit in small:
            piece = self._body[at : at + unit.nbytes]
            self._copied.append((piece.view(unit.source.dtype).view(unit.source.shape), unit))
            self._taken.append(Unit(piece, piece.data_ptr(), unit.start, unit.nbytes, unit.block, piece))
            self._pieces[unit.source.data_ptr(), unit.nbytes] = piece
            at += padded(unit.nbytes)

    def changed(self) -> list[str]:
        """Returns tensors that should last until the next update, but have been written to since ``take``."""
        if self._plan is None:
            return []
        pairs = zip(self._plan.whole.watched.items(), self._late, strict=True)
        return [name for (name, tensor), before in pairs if tensor._version != before]

    @property
    def alone(self) -> list[str]:
        """Tensors that the updates change, and that no other rank is known to have."""
        if self._plan is None:
            return []
        me = {self.stamp.rank} if self.stamp is not None else set()
        return [name for name in self._plan.watched if not set(self._plan.replicas.get(name, ())) - me]

    @property
    def shared(self) -> bool:
        """True if other ranks of the node copy a part of what this one holds."""
        return self._plan is not None and self._plan.whole is not self._plan

    def _write(self, file: LocalStateWriter, stamp: ShardId, plan: CopyPlan) -> None:
        told, self._told = self._told, False  # should this fail, the files may be gone, plan and all
        if not told:
            file.set_plan(stamp, plan.static, [unit.block for unit in self._taken], plan.replicas)
        self._wait()
        file.write(
            stamp, self.values, memoryview((ctypes.c_char * len(self._body)).from_address(self._body.data_ptr()))
        )
        self._told = True

    def _wait(self) -> None:
        if not all(event.wait(_STUCK) for event in self.events.values()):
            raise RekindleError(f"a device has not ended its step within {_STUCK:.0f} s")

    def plan(self, *, whole: bool) -> CopyPlan:
        """Returns a plan of where the bytes of ``stamp`` are now: small ones as taken, others where they live.

        With ``whole`` of all that this rank holds, else of its part. Raises RekindleError when some have been changed.
        """
        assert self._plan is not None
        self._wait()
        changed = [u for u, before in zip(self._left, self._versions, strict=True) if u.counter._version != before]
        if changed:
            at = self._plan.whole.layout.tensor_of(changed[0].block)
            raise RekindleError(f"{at} has been changed since the step's end, and is too large to be kept at each step")
        plan = self._plan.whole if whole else self._plan
        early: dict[torch.device, Batch] = {}
        for unit in (unit for batch in plan.early for unit in batch.units):
            piece = self._pieces.get((unit.source.data_ptr(), unit.nbytes))
            if piece is not None:
                unit = Unit(piece, piece.data_ptr(), unit.start, unit.nbytes, unit.block, piece)
            early.setdefault(device_of(unit.source), Batch(device_of(unit.source), [])).units.append(unit)
        return replace(plan, early=list(early.values()))
