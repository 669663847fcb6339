"""Broadcasts bytes that ranks want alike, such as those of replicas: one reads them for all, from afar.

That is from storage or from another node: a node that comes without memory has a link, and a disk, for all its ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from rekindle.format.layout import BLOCK
from rekindle.format.reader import NullSink, ShardReader, Sink, consecutive_runs, copy_from_address
from rekindle.format.receipt import checksum
from rekindle.memory.nodes import Nodes
from rekindle.session.group import ProcessGroup, SingleProcess

__all__ = ["BlockRequest", "broadcast_common", "readers_together"]

_PARCEL = 4 << 20
"""Bytes that are sent in one go; a block of 16 MiB goes as it is."""
_AHEAD = 3
"""Parcels that a rank has read, and parcels that are on their way, at a time. With the ranks' other buffers this
bounds the memory that a broadcast takes: some 6 parcels of at most 16 MiB."""
_WORTH = 16 << 20
"""Common bytes from which on a broadcast pays."""

BlockKey = tuple[int, str]
"""Length and checksum of a block: two blocks that agree in both hold the same bytes."""
_Spot = tuple[int, int]
"""Number of a request, and of a block in it."""


@dataclass(frozen=True)
class _Parcel:
    owner: int
    keys: list[BlockKey]

    @property
    def nbytes(self) -> int:
        return sum(nbytes for nbytes, _ in self.keys)


@dataclass
class BlockRequest:
    """Blocks of one shard that this rank wants, and the sink that takes them."""

    reader: ShardReader
    sink: Sink
    left: list[int]
    """Numbers of the blocks that are still to be read, ascending."""
    damaged: list[int] = field(default_factory=list)
    """Numbers of blocks that this rank has read, and that differ from their checksums."""


@contextmanager
def readers_together(
    group: SingleProcess | ProcessGroup, far: Sequence[bool], nodes: Nodes | None
) -> Iterator[ProcessGroup | None]:
    """Gives the group in which this rank reads what it has in common with others; None if it reads all by itself.

    ``far`` tells by rank if it reads from afar. If all do they are the group, else those of a node if all of them do.
    A collective, in which groups may be made for as long as the context lasts.
    """
    if isinstance(group, SingleProcess) or group.world == 1:
        yield None
    elif all(far):
        yield group
    else:
        parts = [node.ranks for node in nodes.nodes if all(far[rank] for rank in node.ranks)] if nodes else []
        with group.parts([ranks for ranks in parts if len(ranks) > 1]) as part:
            yield part


def broadcast_common(group: ProcessGroup, requests: Sequence[BlockRequest]) -> None:
    """Fills the blocks that all ranks want. Each of the ``requests`` keeps the rest in ``left``.

    A collective, in which every rank reads about an equal part. A rank verifies what it receives, so a rank whose copy
    is damaged or can't be read sends what it has all the same: the others then find those blocks in ``left``, and only
    the rank itself learns that its copy is damaged. Raises MissingRankError when a rank doesn't answer in time.
    """
    here: dict[BlockKey, list[_Spot]] = {}
    for number, request in enumerate(requests):
        receipt = request.reader.shard.receipt
        for block in request.left:
            start, stop = receipt.layout.blocks[block]
            here.setdefault((stop - start, receipt.checksums[block]), []).append((number, block))
    parcels = _assign(_common(group, here), group.world)
    if sum(parcel.nbytes for parcel in parcels) < _WORTH:
        return
    broadcaster = _Broadcaster(group, requests, here)
    broadcaster.run(parcels)
    filled = {spot for parcel in parcels for key in parcel.keys for spot in here[key]} - broadcaster.arrived_damaged
    for number, request in enumerate(requests):
        request.left = [block for block in request.left if (number, block) not in filled]
        request.damaged = sorted(block for at, block in broadcaster.own_damaged if at == number)


def _common(group: ProcessGroup, here: dict[BlockKey, list[_Spot]]) -> list[BlockKey]:
    """Returns the blocks that all ranks want, in the order in which rank 0 has them.

    For that, rank 0 sends its list, and each rank a byte for every block.
    """
    offered: list[BlockKey] = group.gather(list(here) if group.rank == 0 else None)[0]
    wanted = group.gather(bytes(key in here for key in offered))
    return [key for number, key in enumerate(offered) if all(ranks[number] for ranks in wanted)]


def _assign(keys: Sequence[BlockKey], world: int) -> list[_Parcel]:
    """Cuts parcels of neighbouring blocks, and gives each to the rank that has the fewest bytes to read so far."""
    parcels: list[_Parcel] = []
    load = [0] * world
    batch: list[BlockKey] = []
    for number, key in enumerate(keys):
        batch.append(key)
        nbytes = sum(size for size, _ in batch)
        if number + 1 == len(keys) or nbytes + keys[number + 1][0] > _PARCEL:
            owner = load.index(min(load))
            load[owner] += nbytes
            parcels.append(_Parcel(owner, batch))
            batch = []
    return parcels


class _ParcelSink(NullSink):
    """Takes blocks into a parcel."""

    def __init__(self, data: memoryview, places: dict[int, tuple[int, int]]) -> None:
        self._data, self._places = data, places

    def place(self, block: int) -> memoryview:
        start, stop = self._places[block]
        return self._data[start:stop]


class _Broadcaster:
    """Reads, sends and receives parcels, for one rank."""

    def __init__(
        self, group: ProcessGroup, requests: Sequence[BlockRequest], here: dict[BlockKey, list[_Spot]]
    ) -> None:
        self._group, self._requests, self._here = group, requests, here
        self._free: list[torch.Tensor] = []
        self.arrived_damaged: set[_Spot] = set()
        """Blocks that arrived damaged."""
        self.own_damaged: set[_Spot] = set()
        """Blocks that this rank was to send, and whose own copy is damaged."""
        self._lost: set[int] = set()
        """Requests whose node did not answer. Each further read would wait for it anew."""

    def run(self, parcels: list[_Parcel]) -> None:
        """Sends and receives all parcels, in this order on all ranks; reading goes on ahead, and hashing behind."""
        mine = deque(number for number, parcel in enumerate(parcels) if parcel.owner == self._group.rank)
        reads: dict[int, Future[torch.Tensor]] = {}
        arriving: deque[Future[None]] = deque()
        with ThreadPoolExecutor(2 * _AHEAD, thread_name_prefix="rekindle-broadcast") as pool:
            try:
                for number, parcel in enumerate(parcels):
                    while mine and len(reads) < _AHEAD:
                        ahead = mine.popleft()
                        reads[ahead] = pool.submit(self._read, parcels[ahead])
                    ours = number in reads
                    buffer = reads.pop(number).result() if ours else self._buffer()
                    done = self._group.broadcast(buffer[: parcel.nbytes], parcel.owner)
                    arriving.append(pool.submit(self._arrive, parcel, buffer, done, ours=ours))
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
            return torch.empty(max(BLOCK, _PARCEL), dtype=torch.uint8, device="cpu")

    def _read(self, parcel: _Parcel) -> torch.Tensor:
        """Reads a parcel from this rank's own file, and fills the blocks here, too."""
        buffer = self._buffer()
        data = _view(buffer)
        places: dict[int, dict[int, tuple[int, int]]] = {}
        at = 0
        for key in parcel.keys:
            number, block = self._here[key][0]
            places.setdefault(number, {})[block] = (at, at + key[0])
            at += key[0]
        bad: set[_Spot] = set()
        for number, blocks in places.items():
            reader = self._requests[number].reader
            for run in consecutive_runs(reader.shard.receipt.layout, sorted(blocks)):
                try:
                    found = run if number in self._lost else reader.read(run, _ParcelSink(data, blocks))
                except OSError:
                    found = run
                    if reader.shard.remote is not None:
                        self._lost.add(number)
                bad.update((number, block) for block in found)
        self.own_damaged |= bad
        for key in parcel.keys:
            number, block = self._here[key][0]
            if (number, block) not in bad:
                self._put(key, buffer, places[number][block][0])
        return buffer

    def _arrive(self, parcel: _Parcel, buffer: torch.Tensor, done: Callable[[], object], *, ours: bool) -> None:
        done()
        at = 0
        for key in parcel.keys if not ours else ():
            if checksum(_view(buffer)[at : at + key[0]]) == key[1]:
                self._put(key, buffer, at)
            else:
                self.arrived_damaged.update(self._here[key])
            at += key[0]
        self._free.append(buffer)

    def _put(self, key: BlockKey, buffer: torch.Tensor, at: int) -> None:
        for number, block in self._here[key]:
            sink = self._requests[number].sink
            place = sink.place(block)
            if place is None:
                sink.take(block, 0, _view(buffer)[at : at + key[0]])
            else:
                copy_from_address(place, buffer.data_ptr() + at)


def _view(buffer: torch.Tensor) -> memoryview:
    return memoryview(buffer.numpy())  # type: ignore[arg-type]
