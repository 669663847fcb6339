"""Bytes that all ranks want, as those of replicas, are read from storage by one of them and sent to the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from rekindle.recovery.group import Group
from rekindle.snapshot.documents import checksum
from rekindle.snapshot.layout import BLOCK
from rekindle.snapshot.pieces import Nowhere, Reader, Sink, move, runs

__all__ = ["exchange"]

_PARCEL = 4 << 20
"""Bytes that are sent in one go; a block of 16 MiB goes as it is."""
_AHEAD = 3
"""Parcels that a rank has read, and parcels that are on their way, at a time. With the ranks' other buffers this bounds
the memory that an exchange takes: some 6 parcels of at most 16 MiB."""
_WORTH = 16 << 20
"""Common bytes from which on it pays to talk about them."""

Key = tuple[int, str]
"""Length and checksum of a block: two blocks that agree in both hold the same bytes."""


@dataclass(frozen=True)
class _Parcel:
    owner: int
    keys: list[Key]

    @property
    def nbytes(self) -> int:
        return sum(nbytes for nbytes, _ in self.keys)


def exchange(group: Group, reader: Reader, sink: Sink) -> tuple[list[int], list[int]]:
    """Fill what all ranks want. Numbers of the blocks that are left for this rank to read, and of damaged ones.

    A collective, in which every rank reads about an equal part. What a rank receives it verifies, so a rank whose copy
    is damaged or can't be read sends what it has all the same: the others then find those blocks among what is left,
    and only the rank itself learns that its copy is damaged. Raises RuntimeError when a rank doesn't answer in time.
    """
    layout = reader.shard.receipt.layout
    here: dict[Key, list[int]] = {}
    for number, ((start, stop), digest) in enumerate(zip(layout.blocks, reader.shard.receipt.checksums, strict=True)):
        here.setdefault((stop - start, digest), []).append(number)
    parcels = _share_out(_common(group, here), group.world)
    if sum(parcel.nbytes for parcel in parcels) < _WORTH:
        return list(range(len(layout.blocks))), []
    mail = _Mail(group, reader, sink, here)
    mail.carry(parcels)
    filled = {number for parcel in parcels for key in parcel.keys for number in here[key]}
    left = [number for number in range(len(layout.blocks)) if number not in filled]
    return sorted(left + mail.again), sorted(mail.damaged)


def _common(group: Group, here: dict[Key, list[int]]) -> list[Key]:
    """What all ranks want, in the order in which rank 0 has it. A byte a block and rank is exchanged for that."""
    offered: list[Key] = group.gather(list(here) if group.rank == 0 else None)[0]
    wanted = group.gather(bytes(key in here for key in offered))
    return [key for number, key in enumerate(offered) if all(ranks[number] for ranks in wanted)]


def _share_out(keys: Sequence[Key], world: int) -> list[_Parcel]:
    """Parcels of neighbouring blocks; each goes to the rank that has the fewest bytes to read so far."""
    parcels: list[_Parcel] = []
    load = [0] * world
    batch: list[Key] = []
    for number, key in enumerate(keys):
        batch.append(key)
        nbytes = sum(size for size, _ in batch)
        if number + 1 == len(keys) or nbytes + keys[number + 1][0] > _PARCEL:
            owner = load.index(min(load))
            load[owner] += nbytes
            parcels.append(_Parcel(owner, batch))
            batch = []
    return parcels


class _Into(Nowhere):
    """A sink that is a parcel."""

    def __init__(self, data: memoryview, places: dict[int, tuple[int, int]]) -> None:
        self._data, self._places = data, places

    def place(self, block: int) -> memoryview:
        start, stop = self._places[block]
        return self._data[start:stop]


class _Mail:
    """One rank's part of an exchange."""

    def __init__(self, group: Group, reader: Reader, sink: Sink, here: dict[Key, list[int]]) -> None:
        self._group, self._reader, self._sink, self._here = group, reader, sink, here
        self._free: list[torch.Tensor] = []
        self.again: list[int] = []
        """Blocks that came damaged."""
        self.damaged: list[int] = []
        """Blocks that this rank was to send, and that its own copy has damaged."""

    def carry(self, parcels: list[_Parcel]) -> None:
        """Send and receive all parcels, in this order on all ranks; reading goes on ahead, and hashing behind."""
        mine = deque(number for number, parcel in enumerate(parcels) if parcel.owner == self._group.rank)
        reads: dict[int, Future[torch.Tensor]] = {}
        arriving: deque[Future[None]] = deque()
        with ThreadPoolExecutor(2 * _AHEAD, thread_name_prefix="rekindle-exchange") as pool:
            try:
                for number, parcel in enumerate(parcels):
                    while mine and len(reads) < _AHEAD:
                        ahead = mine.popleft()
                        reads[ahead] = pool.submit(self._read, parcels[ahead])
                    ours = number in reads
                    buffer = reads.pop(number).result() if ours else self._buffer()
                    done = self._group.broadcast(buffer[: parcel.nbytes], parcel.owner)
                    arriving.append(pool.submit(self._arrive, parcel, buffer, done, ours))
                    while len(arriving) >= _AHEAD:
                        arriving.popleft().result()
                while arriving:
                    arriving.popleft().result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _buffer(self) -> torch.Tensor:
        try:
            return self._free.pop()
        except IndexError:
            return torch.empty(max(BLOCK, _PARCEL), dtype=torch.uint8)

    def _read(self, parcel: _Parcel) -> torch.Tensor:
        """A parcel from this rank's own file, put in place here too."""
        buffer = self._buffer()
        data = _view(buffer)
        places, at = {}, 0
        for key in parcel.keys:
            places[self._here[key][0]] = (at, at + key[0])
            at += key[0]
        bad: list[int] = []
        for run in runs(self._reader.shard.receipt.layout, sorted(places)):
            try:
                bad += self._reader.read(run, _Into(data, places))
            except OSError:
                bad += run
        self.damaged += bad
        for key in parcel.keys:
            first = self._here[key][0]
            if first not in bad:
                self._put(key, buffer, places[first][0])
        return buffer

    def _arrive(self, parcel: _Parcel, buffer: torch.Tensor, done: Callable[[], object], ours: bool) -> None:
        done()
        at = 0
        for key in parcel.keys if not ours else ():
            if checksum(_view(buffer)[at : at + key[0]]) == key[1]:
                self._put(key, buffer, at)
            else:
                self.again += self._here[key]
            at += key[0]
        self._free.append(buffer)

    def _put(self, key: Key, buffer: torch.Tensor, at: int) -> None:
        for number in self._here[key]:
            place = self._sink.place(number)
            if place is None:
                self._sink.take(number, 0, _view(buffer)[at : at + key[0]])
            else:
                move(place, buffer.data_ptr() + at)


def _view(buffer: torch.Tensor) -> memoryview:
    return memoryview(buffer.numpy())  # type: ignore[arg-type]
