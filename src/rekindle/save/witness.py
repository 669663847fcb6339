"""Looks at tensors that nothing may change for a while, twice: what differs was changed by something unannounced.

Torch counts most writes to a tensor, but none through ``data``, by kernels that take an address, or by a replayed
graph. A look takes a few bytes of each tensor, with ``whole`` a sum of all of them too. On a device it is queued like a
copy. On the host the operating system takes them (``pwritev``), 0.05 microseconds a piece: it refuses memory that has
gone, whose reading here would end the process. The copy is compared with a look as well (``torn``): what was changed
and changed back meanwhile shows nowhere else.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import xxhash

from rekindle.devices.accelerator import as_integers
from rekindle.devices.backend import Backend
from rekindle.devices.events import Event, record, wait_for_copy
from rekindle.devices.table import device_of, is_host, require_backend
from rekindle.errors import RekindleError
from rekindle.format.layout import BLOCK
from rekindle.save.plan import MovedError, Unit, require_in_place

__all__ = ["PLACES", "Look", "Witness"]

PLACES = 3
_PIECE = 16
"""Bytes of a piece: an element of any type at least."""
_LARGE = 64 << 10
"""Bytes from which a unit is looked at in three places, its first and last bytes among them; a smaller one in one."""
_AT_ONCE = 1024
"""Pieces that the kernel copies in one call: IOV_MAX."""
_SLOTS = 4
"""Most copies whose pieces are kept: a rank has no more slots."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.pwritev.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_long]
_libc.pwritev.restype = ctypes.c_ssize_t


class Look:
    """Bytes of some units as they were. ``read`` it before the witness looks from the same place again."""

    def __init__(self, parts: Mapping[tuple[torch.device, bool], _Seen]) -> None:
        """``parts``: what was seen of each device, pieces (False) and sums (True)."""
        self._parts = parts

    @property
    def events(self) -> list[Event]:
        """Points at which devices have looked."""
        return [part.event for part in self._parts.values() if part.event is not None]

    @property
    def kept(self) -> bool:
        """True if it has been read."""
        return all(part.kept for part in self._parts.values())

    def read(self) -> None:
        """Wait until devices have looked, and keep what was seen. Raises RekindleError when one is stuck."""
        for part in self._parts.values():
            part.read()

    def differing(self, other: Look) -> list[Unit]:
        """Returns units of which ``other``, a look at no fewer devices, has seen something else. Waits as ``read``."""
        return _once(unit for key, part in self._parts.items() for unit in part.differing(other._parts[key]))

    def of(self, device: torch.device, *, sums: bool) -> _Seen | None:
        """Returns the pieces, or the sums, seen of a device; None if it wasn't looked at so."""
        return self._parts.get((device, sums))


class _Seen:
    """Bytes of the units of one device: so many of each, one behind the other."""

    def __init__(
        self, units: Sequence[Unit], widths: Sequence[int], data: Callable[[], bytes], event: Event | None = None
    ) -> None:
        self.units, self._widths, self._data, self.event = units, widths, data, event
        self._bytes: bytes | None = None

    def as_now(self, data: bytes) -> _Seen:
        """Returns the same of other bytes."""
        return _Seen(self.units, self._widths, lambda: data)

    @property
    def kept(self) -> bool:
        return self._bytes is not None

    def read(self) -> bytes:
        if self._bytes is None:
            if self.event is not None:
                wait_for_copy(self.event)
            self._bytes = self._data()
        return self._bytes

    def differing(self, other: _Seen) -> list[Unit]:
        mine, others = self.read(), other.read()
        if mine == others:
            return []
        found, at = [], 0
        for unit, width in zip(self.units, self._widths, strict=True):
            if mine[at : at + width] != others[at : at + width]:
                found.append(unit)
            at += width
        return found


class Witness:
    """Looks at ``units`` again and again. One thread at a time."""

    def __init__(self, units: Iterable[Unit]) -> None:
        by_device: dict[torch.device, list[Unit]] = {}
        for unit in units:
            by_device.setdefault(device_of(unit.source), []).append(unit)
        self._reader = reader = _Reader()
        self._watched: dict[torch.device, _Host | _Device] = {
            device: _Host(found, reader) if is_host(device) else _Device(device, found)
            for device, found in by_device.items()
        }
        self._copies: dict[tuple[int, torch.device], _Pieces] = {}
        """Pieces of copies, by the address of the shard's first byte."""

    def look(
        self,
        place: int,
        *,
        whole: bool,
        on: Callable[[torch.device], AbstractContextManager[None]] = lambda device: nullcontext(),
        only: Callable[[torch.device], bool] = lambda device: True,
    ) -> Look:
        """Look at the host's units now. Queue a look at those of devices, on the stream that ``on`` makes current.

        ``only`` tells which devices, the host among them, to look at. Looks of one ``place``, of ``PLACES``, are kept
        in the same memory. Raises MovedError when a tensor's memory is not where it was.
        """
        seen: dict[tuple[torch.device, bool], _Seen] = {}
        for device, watched in self._watched.items():
            if only(device):
                with on(device) if isinstance(watched, _Device) else nullcontext():
                    seen[device, False] = watched.look(place)
                    if whole:
                        seen[device, True] = watched.add_up(place)
        return Look(seen)

    def torn(self, look: Look, address: int, sums: Sequence[str], *, exact: bool) -> list[Unit]:
        """Returns units of which a finished copy holds something else than ``look`` has seen. Waits as ``read``.

        The shard's first byte is at ``address``; ``sums`` are its checksums. With ``exact`` the sums of a ``whole``
        look are compared too: those of the host by ``sums``, those of devices by a pass over the copy.
        """
        found: list[Unit] = []
        for device, watched in self._watched.items():
            seen = look.of(device, sums=False)
            if seen is not None:
                found += seen.differing(self._pieces_of_copy(seen, device, address))
            seen = look.of(device, sums=True) if exact else None
            if seen is not None:
                found += seen.differing(watched.sums_of_copy(seen.units, address, sums))
        return _once(unit for unit in found if not _is_changed_on_the_way(unit))

    def _pieces_of_copy(self, seen: _Seen, device: torch.device, address: int) -> _Seen:
        if len(self._copies) > _SLOTS * len(self._watched):
            self._copies.clear()
        pieces = self._copies.get((address, device))
        if pieces is None:
            pieces = _Pieces((address + u.start + at, nbytes) for u in seen.units for at, nbytes in _spans(u))
            self._copies[address, device] = pieces
        return seen.as_now(self._reader.read(pieces))


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class _Pieces:
    """Pieces of the host's memory, by address and length."""

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        found = list(spans)
        self._vector = (_IoVec * len(found))(*[_IoVec(*span) for span in found])
        start = ctypes.addressof(self._vector)
        parts = [(at, [nbytes for _, nbytes in found[at : at + _AT_ONCE]]) for at in range(0, len(found), _AT_ONCE)]
        self.calls = [(start + at * ctypes.sizeof(_IoVec), len(part), sum(part)) for at, part in parts]
        """Address, number of pieces and bytes of each call that reads them."""


class _Reader:
    """Has the operating system read memory, by way of a file. Thread-safe."""

    def __init__(self) -> None:
        self._file = _unnamed_file()
        self._using = threading.Lock()
        weakref.finalize(self, os.close, self._file)

    def read(self, pieces: _Pieces) -> bytes:
        """Returns the bytes of ``pieces``. Raises OSError when their memory is not there any more."""
        at = 0
        with self._using:
            for address, count, nbytes in pieces.calls:
                if _libc.pwritev(self._file, address, count, at) != nbytes:
                    raise OSError(ctypes.get_errno(), "memory can't be read")
                at += nbytes
            return os.pread(self._file, at, 0)


class _Host:
    """Units in the host's memory."""

    def __init__(self, units: list[Unit], reader: _Reader) -> None:
        self._units, self._reader = units, reader
        self._pieces = _Pieces((unit.address + at, nbytes) for unit in units for at, nbytes in _spans(unit))
        self._widths = [sum(nbytes for _, nbytes in _spans(unit)) for unit in units]

    def look(self, place: int) -> _Seen:
        try:
            taken = self._reader.read(self._pieces)
        except OSError:
            raise MovedError(unit for unit in self._units if unit.moved) from None
        return _Seen(self._units, self._widths, lambda: taken)

    def add_up(self, place: int) -> _Seen:
        sums = b"".join(map(_hash, self._units))
        return _Seen(self._units, [8] * len(self._units), lambda: sums)

    def sums_of_copy(self, units: Sequence[Unit], address: int, sums: Sequence[str]) -> _Seen:
        found = [
            bytes.fromhex(sums[unit.block]) if unit.nbytes <= BLOCK else _hash_at(address + unit.start, unit.nbytes)
            for unit in units
        ]
        return _Seen(units, [8] * len(units), lambda: b"".join(found))


def _once(units: Iterable[Unit]) -> list[Unit]:
    """Returns the units, each once."""
    return list({id(unit): unit for unit in units}.values())


def _unnamed_file() -> int:
    """Returns the descriptor of a file without a name: in memory, where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("rekindle-witness")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class _Device:
    """Units in a device's memory. Looks at them go into page-locked memory, by way of the device's own."""

    def __init__(self, device: torch.device, units: list[Unit]) -> None:
        self._device, self._units = device, units
        plain = [unit for unit in units if not _is_changed_on_the_way(unit)]
        self._sampled = plain
        self._pieces = [piece for unit in plain for piece in _device_pieces(unit)]
        self._widths = [sum(nbytes for _, nbytes in _spans(unit)) for unit in plain]
        self._buffers: dict[bool, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        """Memory of the device and of the host for each place, by kind of look."""

    def look(self, place: int) -> _Seen:
        backend = self._backend()
        near, far = self._buffers_of(backend, place, whole=False)
        if self._pieces:
            with torch.no_grad():
                backend.gather(near, self._pieces)
        return self._seen(backend, near, far, self._sampled, self._widths)

    def add_up(self, place: int) -> _Seen:
        backend = self._backend()
        near, far = self._buffers_of(backend, place, whole=True)
        with torch.no_grad():
            backend.add_up(list(near.view(torch.int64).unbind()), [unit.part().detach() for unit in self._units])
        return self._seen(backend, near, far, self._units, [8] * len(self._units))

    def _backend(self) -> Backend:
        require_in_place(self._units)
        return require_backend(self._device)

    def _seen(
        self, backend: Backend, near: torch.Tensor, far: torch.Tensor, units: Sequence[Unit], widths: Sequence[int]
    ) -> _Seen:
        backend.copy([far], [near])
        return _Seen(units, widths, lambda: far.numpy().tobytes(), record(self._device))

    def sums_of_copy(self, units: Sequence[Unit], address: int, sums: Sequence[str]) -> _Seen:
        found = torch.zeros(len(units), dtype=torch.int64)
        for place, unit in zip(found.unbind(), units, strict=True):
            data = torch.frombuffer((ctypes.c_char * unit.nbytes).from_address(address + unit.start), dtype=torch.uint8)
            words = as_integers(unit.part().detach() if unit.in_order else data).dtype  # sums of others are others
            place.copy_(torch.sum(data.view(words), 0, dtype=torch.int64))
        return _Seen(units, [8] * len(units), lambda: found.numpy().tobytes())

    def _buffers_of(self, backend: Backend, place: int, *, whole: bool) -> tuple[torch.Tensor, torch.Tensor]:
        if whole not in self._buffers:  # for all places: beside a device that is stuck no memory can be made
            nbytes = 8 * len(self._units) if whole else sum(self._widths)
            try:
                pairs = [(backend.allocate(self._device, nbytes), backend.pinned(nbytes)) for _ in range(PLACES)]
                self._buffers[whole] = pairs
            except RuntimeError as error:
                raise RekindleError(f"{self._device} has no memory for looks: {error}") from error
        return self._buffers[whole][place]


def _spans(unit: Unit) -> list[tuple[int, int]]:
    """Returns the pieces to look at: first byte, counted from the unit's, and length."""
    if not unit.in_order:
        return [(0, min(_PIECE, unit.source.itemsize))]
    last = max(0, unit.nbytes - _PIECE)
    middle = min(unit.nbytes // 2 // _PIECE * _PIECE, last)
    starts = [0, middle, last] if unit.nbytes >= _LARGE else [middle]
    return [(at, min(_PIECE, unit.nbytes)) for at in starts]


def _device_pieces(unit: Unit) -> list[torch.Tensor]:
    source = unit.source.detach()
    if not unit.in_order:
        return [source.as_strided((1,), (1,)).view(torch.uint8)]
    data = unit.part().detach().view(torch.uint8)
    return [data[at : at + nbytes] for at, nbytes in _spans(unit)]


def _hash(unit: Unit) -> bytes:
    require_in_place([unit])
    part = unit.part().detach().resolve_conj().resolve_neg().contiguous()
    return _hash_at(part.data_ptr(), unit.nbytes)


def _hash_at(address: int, nbytes: int) -> bytes:
    return xxhash.xxh3_64_digest(memoryview((ctypes.c_char * nbytes).from_address(address)))


def _is_changed_on_the_way(unit: Unit) -> bool:
    """True for a view whose copy has other bytes than its memory, which a look sees."""
    return unit.source.is_conj() or unit.source.is_neg()
