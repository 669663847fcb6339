"""Describes the bytes of a file that is to be saved: where each of them lies now, and where it goes."""

from __future__ import annotations

import ctypes
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rekindle.format.file_receipt import BYTES, TORCH
from rekindle.format.torchzip import ZipLayout, lay_out

__all__ = ["Contents", "Segment", "of_bytes", "of_records", "segment_of"]

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Segment:
    """Consecutive bytes of the file that lie together in memory now."""

    start: int
    nbytes: int
    address: int
    """Address of the first byte; 0 for bytes that only ``put`` can reach."""
    owner: object
    """Keeps them where they are."""
    put: Callable[[memoryview], object] | None = None
    """Copies them to a place, from a device."""

    @property
    def stop(self) -> int:
        """End of it in the file."""
        return self.start + self.nbytes

    def view(self) -> memoryview:
        """Returns its bytes. From a device they are copied."""
        if self.put is None:
            return memoryview((ctypes.c_char * self.nbytes).from_address(self.address)).cast("B")
        copy = memoryview(bytearray(self.nbytes))
        self.put(copy)
        return copy


class Contents:
    """The bytes of a file, not yet copied."""

    def __init__(self, kind: str, nbytes: int, segments: list[Segment], layout: ZipLayout | None = None) -> None:
        """``segments`` are in order and leave no gaps. ``layout`` is that of a zip file whose CRC-32 fields are 0."""
        self.kind, self.nbytes = kind, nbytes
        self.segments = [segment for segment in segments if segment.nbytes]
        self._starts = [segment.start for segment in self.segments]
        self._layout = layout

    def between(self, start: int, stop: int) -> Iterator[tuple[Segment, int, int]]:
        """Yields the parts of segments that lie between two bytes of the file: (segment, first byte, end)."""
        number = max(0, bisect_right(self._starts, start) - 1)
        while number < len(self.segments) and self._starts[number] < stop:
            segment = self.segments[number]
            yield segment, max(start, segment.start), min(stop, segment.stop)
            number += 1

    def chunks(self) -> Iterator[memoryview]:
        """Yields all bytes in order. Those of a zip file are read twice, to fill in its CRC-32 fields."""
        filled: dict[int, bytes] = {}
        if self._layout is not None:
            filled = dict(self._layout.with_crcs([self._crc(r.start, r.stop) for r in self._layout.records]))
        for segment in self.segments:
            yield memoryview(filled[segment.start]) if segment.start in filled else segment.view()

    def _crc(self, start: int, stop: int) -> int:
        crc = 0
        for segment, at, end in self.between(start, stop):
            crc = zlib.crc32(segment.view()[at - segment.start : end - segment.start], crc)
        return crc


def of_bytes(data: Buffer) -> Contents:
    """Returns the contents of a file of these bytes."""
    view = memoryview(data)
    if not view.c_contiguous:
        view = memoryview(view.tobytes())
    view = view.cast("B") if view.nbytes else memoryview(b"")
    return Contents(BYTES, view.nbytes, [segment_of(view, 0)])


def of_records(records: Sequence[tuple[str, Segment]]) -> Contents:
    """Returns the contents of a file of ``torch.save`` with these records, by name. Their ``start`` doesn't count."""
    layout = lay_out([(name, segment.nbytes) for name, segment in records])
    segments = [segment_of(memoryview(part), at) for at, part in layout.parts]
    segments += [
        replace(segment, start=record.start) for record, (_, segment) in zip(layout.records, records, strict=True)
    ]
    return Contents(TORCH, layout.nbytes, sorted(segments, key=lambda segment: segment.start), layout)


def segment_of(view: memoryview, start: int) -> Segment:
    """Returns the segment of a buffer's bytes."""
    if view.readonly:
        data = view.obj if isinstance(view.obj, bytes) and len(view.obj) == view.nbytes else bytes(view)
        return Segment(start, view.nbytes, ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0, data)
    anchor = (ctypes.c_char * view.nbytes).from_buffer(view)
    return Segment(start, view.nbytes, ctypes.addressof(anchor), anchor)
