"""Describes what a save copies, in which order and where to: made once for a state, used for save after save."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from rekindle.devices.batches import DEVICE_BATCH
from rekindle.devices.table import device_of, has_queues, is_host
from rekindle.errors import RekindleError
from rekindle.format.boxes import Box
from rekindle.format.layout import Chunk, Layout, block_ranges
from rekindle.format.receipt import Receipt
from rekindle.memory.pages import AT_ONCE
from rekindle.state.traits import Traits

__all__ = ["IN_STEP", "Batch", "CopyPlan", "MovedError", "Piece", "Unit", "batches", "in_batches", "require_in_place"]

IN_STEP = AT_ONCE
"""Bytes of a rank's snapshot up to which ``step()`` copies and commits all of it itself, if all of it is on the host.

A returned ``step(n)`` is then a committed n, whoever dies. The price is the copy with its checksums, 4 to 5 GB/s on one
thread: 3 to 4 ms inside of ``step()`` at the limit on an idle machine (docs/benchmarks.md). Larger
snapshots are copied behind ``step()``, where the same work may be hidden by training.
"""

_BATCH = 4 << 20
"""Bytes after which a batch is full: small enough to share out among threads, large enough to be worth handing over."""


@dataclass(frozen=True)
class Unit:
    """The object of one copy: a tensor, or one checksum block of a tensor whose bytes can be copied as they lie."""

    source: torch.Tensor
    """The whole tensor."""
    address: int
    """Address of the bytes, in the memory of the host or of a device."""
    start: int
    """First byte in the shard, counted from the start of its data."""
    nbytes: int
    block: int
    """Number of its first checksum in the receipt."""
    counter: torch.Tensor
    """The tensor whose version counts what is written to ``source``."""
    offset: int = 0
    """Its first byte, counted from the first of ``source``."""
    in_order: bool = True
    """True if the bytes can be copied as they lie; else torch brings the tensor into order, all of it."""

    @property
    def moved(self) -> bool:
        """True if the tensor's memory is not where it was: it has been freed, resized or offloaded."""
        return self.source.data_ptr() != self.address - self.offset

    def part(self) -> torch.Tensor:
        """Returns the elements to copy."""
        if not self.in_order:
            return self.source
        width = self.source.itemsize
        return self.source.view(-1).narrow(0, self.offset // width, self.nbytes // width)

    def view(self, buffer: Any, base: int) -> torch.Tensor:
        """Returns the place of ``part`` in a shard whose data starts at byte ``base`` of ``buffer``."""
        count = self.nbytes // self.source.itemsize
        flat = torch.frombuffer(buffer, dtype=self.source.dtype, count=count, offset=base + self.start)
        return flat if self.in_order else flat.view(self.source.shape)


class MovedError(RekindleError):
    """Memory of ``units`` was freed, resized or offloaded between a step and the next update, while it was copied."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self.units = list(units)
        super().__init__("a tensor's memory was freed or resized between ckpt.step() and the next update")


def require_in_place(units: Iterable[Unit]) -> None:
    """Raises MovedError if a tensor's memory is not where it was: somebody else's bytes may be there by now."""
    moved = [unit for unit in units if unit.moved]
    if moved:
        raise MovedError(moved)


@dataclass(frozen=True)
class Piece:
    """A box of a tensor that this rank holds."""

    chunk: Chunk
    source: torch.Tensor
    counter: torch.Tensor
    late: bool
    """True if it stays as it is until the next update."""
    ranks: tuple[int, ...]
    """All ranks that hold the same, as far as that is known."""

    @property
    def box(self) -> Box:
        """Offsets and sizes within the tensor."""
        return self.chunk.box

    def rows(self, rows: Box) -> Piece:
        """Returns the piece with these rows only."""
        if rows == self.box:
            return self
        source = self.source.narrow(0, rows.offsets[0] - self.chunk.offsets[0], rows.sizes[0])
        return replace(self, chunk=replace(self.chunk, offsets=rows.offsets, sizes=rows.sizes), source=source)

    def with_trait(self, trait: Traits) -> Piece:
        """Returns the piece with the trait of its tensor."""
        return replace(self, chunk=replace(self.chunk, **trait._asdict()))


@dataclass(frozen=True)
class Batch:
    """Some MiB of units, in the order of their bytes: what one thread copies and hashes in one go."""

    device: torch.device
    """Device of all of them."""
    units: list[Unit]

    @property
    def start(self) -> int:
        """First byte in the shard, by which batches of a plan are told apart."""
        return self.units[0].start

    @property
    def on_host(self) -> bool:
        """True if it is in the host's memory."""
        return is_host(self.device)


@dataclass(frozen=True)
class CopyPlan:
    """All about the copying of a state that stays the same from save to save."""

    layout: Layout
    structure: Any
    early: list[Batch]
    """Units that may change as soon as training goes on: copied before ``step()`` returns."""
    late: list[Batch]
    """Units that stay as they are until the next update."""
    watched: dict[str, torch.Tensor]
    """By name: the tensors whose version counters count what is written to those of ``late``."""
    replicas: dict[str, tuple[int, ...]]
    """By tensor that may be copied late: the ranks that are known to have the same bytes of it after each update.
    What updates alike stays alike."""
    _whole: CopyPlan | None = None

    @property
    def whole(self) -> CopyPlan:
        """Plan that copies all that this rank holds, whoever else holds it too."""
        return self._whole or self

    @property
    def devices(self) -> set[torch.device]:
        """Devices of its tensors that work off queues, behind the host."""
        return {b.device for b in self.early + self.late if has_queues(b.device)}

    @property
    def on_host(self) -> bool:
        """True if all of it is in the host's memory, so that no device has to be waited for."""
        return all(batch.on_host for batch in self.early + self.late)

    @property
    def fits_in_step(self) -> bool:
        """True if it is small enough for ``step()`` to copy all of it."""
        return self.on_host and self.layout.file_bytes <= IN_STEP

    @cached_property
    def static(self) -> bytes:
        """Part of the receipt that only changes with the layout. Not made before a commit needs it."""
        return Receipt.static_part(self.layout, self.structure)


def batches(layout: Layout, pieces: Mapping[tuple[str, tuple[int, ...]], Piece]) -> tuple[list[Batch], list[Batch]]:
    """Returns the units to copy at once, and those that can wait, in batches."""
    early: list[Unit] = []
    late: list[Unit] = []
    block = 0
    for chunk in layout.chunks:
        piece = pieces[chunk.name, chunk.offsets]
        (late if piece.late else early).extend(_units(chunk, piece, block))
        block += chunk.block_count
    return in_batches(early), in_batches(late)


def in_batches(units: Iterable[Unit]) -> list[Batch]:
    """Returns the units in batches of one device each, in their order."""
    full: list[Batch] = []
    filling: dict[torch.device, tuple[Batch, int]] = {}
    for unit in units:
        device = device_of(unit.source)
        batch, waiting = filling.get(device) or (Batch(device, []), 0)
        if not batch.units:
            full.append(batch)
        batch.units.append(unit)
        waiting += unit.nbytes
        limit = _BATCH if is_host(device) else DEVICE_BATCH
        filling[device] = (batch, waiting) if waiting < limit else (Batch(device, []), 0)
    return full


def _units(chunk: Chunk, piece: Piece, block: int) -> list[Unit]:
    if not chunk.nbytes:
        return []
    source = piece.source
    if not source.is_contiguous() or source.is_conj() or source.is_neg():
        return [Unit(source, source.data_ptr(), chunk.start, chunk.nbytes, block, piece.counter, in_order=False)]
    address = source.data_ptr() - chunk.start
    return [
        Unit(source, address + at, at, stop - at, block + i, piece.counter, at - chunk.start)
        for i, (at, stop) in enumerate(block_ranges(chunk))
    ]
