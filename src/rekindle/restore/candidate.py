"""Tries one candidate on one rank: finds all that the live state wants of it, and fills that in, verified."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from rekindle.devices.streams import ThreadStreams, synchronize
from rekindle.devices.table import used
from rekindle.errors import RekindleError, StateMismatchError, UsageError
from rekindle.format.boxes import Box
from rekindle.format.completeness import tensor_names
from rekindle.format.layout import block_ranges
from rekindle.format.lineage import CheckpointKey
from rekindle.format.reader import read_blocks
from rekindle.format.receipt import Receipt
from rekindle.restore.broadcast import BlockRequest, broadcast_common
from rekindle.restore.fill import Filling
from rekindle.restore.load import build, check_values, load
from rekindle.restore.match import Match, mismatch
from rekindle.restore.partial import Counts, table, unloaded
from rekindle.restore.reshard import Have, ReadPlan, plan
from rekindle.restore.saved import Saved
from rekindle.restore.sources import ShardSource, Sources
from rekindle.session.group import ProcessGroup
from rekindle.state.tree import entries
from rekindle.storage.catalog import MEMORY, PEER, STORAGE, StoredCopy

__all__ = ["Candidate", "Verdict", "half_loaded"]

log = logging.getLogger("rekindle")

_half_loaded: dict[int, weakref.ref[Any]] = {}
"""By id: modules and optimizers that a load has begun to write into, and none has completed since."""


def half_loaded(state: Mapping[str, Any]) -> bool:
    """Returns True if a part of the live state is neither what it was nor what a checkpoint holds."""
    marks = [_half_loaded.get(id(entry)) for entry in state.values()]
    return any(mark is not None and mark() is entry for mark, entry in zip(marks, state.values(), strict=True))


@dataclass
class Verdict:
    """The state of one candidate on one rank. ``reasons`` tell why copies were passed over."""

    place: str | None = None
    """Farthest place that a part of what is wanted comes from; None when it is not to be had."""
    far: bool = False
    """True if bytes of tensors come from afar: from storage, or another node."""
    nbytes: int = 0
    """Bytes of the blocks that hold what is wanted."""
    read: int = 0
    """Bytes that this rank has read, headers included; fewer than ``nbytes`` when others sent it the rest."""
    seconds: float = 0.0
    reasons: list[str] = field(default_factory=list)
    error: RekindleError | None = None
    """Reason not to load it though it may be sound; raised on all ranks."""
    surplus: set[str] = field(default_factory=set)
    """Names in this rank's part of the checkpoint that its live state has no place for. Another rank's may."""
    half_loaded: bool = False
    counts: Counts = field(default_factory=dict)
    """By entry of the live state: how much of it matches."""
    there: set[str] = field(default_factory=set)
    """Entries of the checkpoint."""
    table: str = ""
    """Table of what is loaded and what isn't, where not all has to match."""
    unloaded: set[str] = field(default_factory=set)
    """Names in this rank's part of the checkpoint that are not loaded here. Another rank may load them."""


class Candidate:
    """One candidate on one rank. Use as a context: shards in use stay open, and in memory pinned, until it ends."""

    def __init__(
        self,
        state: Mapping[str, Any],
        key: CheckpointKey,
        copies: Sequence[StoredCopy],
        ranks: tuple[int, int],
        *,
        allow_pickle: bool,
        parts: frozenset[str] | None = None,
        casts: bool = False,
    ) -> None:
        """``ranks``: this rank and the number of all. Values, and what each rank has of its own, come from the shard
        of this rank, modulo the number of shards. ``parts``: entries of the state to load as far as they match; None
        when all has to match. ``casts``: tensors of modules may have another dtype."""
        self.verdict = Verdict()
        self._key = key
        self._state, self._allow_pickle, self._parts, self._casts = state, allow_pickle, parts, casts
        saved = copies[0].world if copies else ranks[1]
        self._resized = saved != ranks[1]
        self._sources = Sources(key, copies, ranks[0] % saved)
        self._match: Match | None = None
        self._fillings: list[tuple[ShardSource, Filling]] = []
        self._trees: dict[str, Any] = {}

    def __enter__(self) -> Candidate:
        return self

    def __exit__(self, *exc: object) -> None:
        self._sources.close()

    @property
    def match(self) -> Match:
        assert self._match is not None
        return self._match

    @property
    def unseen(self) -> list[int]:
        """Ranks of which no shard was opened."""
        return self._sources.unseen

    def open(self) -> None:
        """Finds what the live state wants. Changes nothing live."""
        self.verdict.place = None
        try:
            found = self._find()
        except (StateMismatchError, UsageError) as error:
            self.verdict.place, self.verdict.error = STORAGE, error
            return
        except Exception as error:  # of what is sealed, and makes no sense all the same
            self._sources.reasons.append(self._nonsense(error))
            return
        finally:
            self.verdict.reasons += self._sources.reasons
            self._sources.reasons = []
        if found:
            home, read = self._sources.home, {source.place for source, _ in self._fillings}
            places = read if home is None else {*read, home.place}
            self.verdict.place = next((place for place in (STORAGE, PEER) if place in places), MEMORY)
            self.verdict.far = bool(read - {MEMORY})
            self.verdict.nbytes = sum(filling.nbytes for _, filling in self._fillings)
            self.verdict.surplus, self.verdict.counts = self.match.surplus, self.match.counts
            self.verdict.there = set(entries(self.match.saved.home.structure))
            if self._parts is not None:
                self.verdict.table = table(self._key[0], self.match)
                self.verdict.unloaded = unloaded(self.match)

    def _find(self) -> bool:
        """Opens more and more shards, until they have all that is wanted, or there are no more."""
        home = self._sources.home
        if home is None:
            return False
        receipt = home.reader.shard.receipt
        check_values(receipt, self._state, allow_pickle=self._allow_pickle)
        if not {chunk.name for chunk in receipt.layout.chunks}.issuperset(tensor_names(receipt.structure)):
            self._sources.more()  # it shared the work: nothing can be told without the others
        while True:
            saved = Saved(receipt)
            for source in self._sources.opened:
                if source is not home:
                    saved.add(source.reader.shard.receipt)
            match = self._match = Match(self._state, saved, self._parts, self._casts)
            wants = match.wants
            haves = self._haves(receipt)
            found = plan([want for _, want, _ in wants], [have for _, _, have in haves])
            if match.problems and self._parts is None:
                raise mismatch(match.problems)
            if not (found.missing or match.absent or match.lacking or match.unsure) or not self._sources.more():
                break
        if not self._whole(match, found):
            return False
        self._plan_fillings(found, wants, haves)
        self._check_ambiguity(match)
        return True

    def _haves(self, home: Receipt) -> list[tuple[ShardSource, int, Have]]:
        """Lists all parts that exist.

        What each rank has of its own is this rank's, however near another's may be. What this rank has no part of may
        be that of ranks that share a tensor with it.
        """
        own: dict[str, list[Box]] = {}
        for chunk in home.layout.chunks:
            if chunk.own:
                own.setdefault(chunk.name, []).append(chunk.box)
        return [
            (source, number, Have(chunk.name, chunk.box, source.cost))
            for source in self._sources.opened
            for number, chunk in enumerate(source.reader.shard.receipt.layout.chunks)
            if source.rank == home.stamp.rank
            or not (chunk.own and any(box.intersect(chunk.box) for box in own.get(chunk.name, ())))
        ]

    def _whole(self, match: Match, found: ReadPlan) -> bool:
        """Returns True if nothing is missing. Raises StateMismatchError for what only the live state has."""
        lacking = match.lacking if self._parts is None else []
        unseen = self._sources.unseen if match.unsure or lacking else []
        if lacking and not unseen:
            raise mismatch([f"{name}: only in the live state" for name in lacking])
        for name in lacking[:1]:
            self._sources.reasons.append(f"{name} may be in the shards of rank(s) {unseen}, which can't be read")
        if match.unsure and unseen:
            self._sources.reasons.append(
                f"optimizer state of some parameters may be in the shards of rank(s) {unseen}, which can't be read"
            )
        self._sources.reasons += match.saved.conflicts[:1]
        for name in match.absent[:1]:
            self._sources.reasons.append(f"no readable shard has any of tensor {name}")
        for want in found.missing[:1]:
            self._sources.reasons.append(f"no readable shard has {want.name}{want.box}")
        return not (match.absent or found.missing or unseen or match.saved.conflicts)

    def _plan_fillings(
        self, found: ReadPlan, wants: Sequence[Any], haves: Sequence[tuple[ShardSource, int, Have]]
    ) -> None:
        """Lays out the moves as one filling for each source."""
        streams = ThreadStreams(used(tensor for _, _, tensor in wants))
        fillings: dict[ShardSource, Filling] = {}
        for move in found.moves:
            source, number, _ = haves[move.have]
            _, want, tensor = wants[move.want]
            if source not in fillings:
                fillings[source] = Filling(source.reader.shard.receipt.layout, streams)
            fillings[source].want(number, move.box, want.box, tensor)
        self._fillings = list(fillings.items())

    def _check_ambiguity(self, match: Match) -> None:
        """Raises StateMismatchError if ranks had different parameters by one name, and are other ranks now."""
        if not self._resized:
            return
        own = {c.name for s in self._sources.opened for c in s.reader.shard.receipt.layout.chunks if c.own}
        if not own & match.parameters:
            return
        while self._sources.more():
            pass
        seen: dict[str, dict[Box, tuple[int, list[str]]]] = {}
        for source in self._sources.opened:
            receipt = source.reader.shard.receipt
            sums = iter(receipt.checksums)
            for chunk in receipt.layout.chunks:
                digests = list(islice(sums, len(block_ranges(chunk))))
                if chunk.own and chunk.name in match.parameters:
                    known = seen.setdefault(chunk.name, {})
                    box = chunk.box
                    met = next((other for other in known if other != box and other.intersect(box) is not None), box)
                    rank, other = known.setdefault(met, (source.rank, digests))
                    if other != digests or met != box:
                        raise StateMismatchError(
                            f"{chunk.name}: ranks {rank} and {source.rank}, which saved it, had different tensors by "
                            "this name, and another number of ranks can't tell whose is whose"
                        )

    def fill(self, together: ProcessGroup | None) -> None:
        """Fills in what is wanted. A copy that turns out damaged is dropped, and others are looked for.

        ``together`` is the group whose ranks read once what they want alike from afar.
        """
        while self.verdict.place is not None and self.verdict.error is None:
            self._mark()
            requests = [BlockRequest(source.reader, filling, filling.blocks) for source, filling in self._fillings]
            if together is not None:
                far = zip(requests, self._fillings, strict=True)
                broadcast_common(together, [request for request, (source, _) in far if source.place != MEMORY])
                together = None  # the other ranks take part once
            if self._read(requests):
                for _, filling in self._fillings:
                    filling.finish()
                self._make_trees()
                return
            self.open()

    def _make_trees(self) -> None:
        """Builds the trees to load now, while the other ranks can still be told of a failure."""
        try:
            self._trees = build(self._state, self.match, allow_pickle=self._allow_pickle)
        except Exception as error:
            self.verdict.place = None
            self.verdict.reasons.append(self._nonsense(error))

    def _nonsense(self, error: Exception) -> str:
        """Describes an error of a checkpoint whose checksums are right, and whose content contradicts itself."""
        home = self._sources.home
        where = f"{home.reader.shard.path}: " if home is not None else ""
        return f"{where}makes no sense: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"

    def _read(self, requests: list[BlockRequest]) -> bool:
        """Reads the rest of the blocks. False when a source had to be dropped."""
        sound = True
        for request, (source, _) in zip(requests, self._fillings, strict=True):
            try:
                bad = request.damaged or read_blocks(request.reader, request.sink, request.left)
                if bad:
                    raise request.reader.shard.corruption(bad[0])
            except (OSError, RekindleError) as error:
                self._sources.drop(source, error)
                sound = False
            finally:
                self.verdict.read += request.reader.nbytes
                request.reader.nbytes = 0
        return sound

    def _mark(self) -> None:
        """Notes what is about to be overwritten, so that a load that fails half-way is known as such."""
        live = [target for target in self.match.targets.values() if target.live]
        synchronize(tensor for target in live for _, tensor in target.pieces)
        for name in {target.entry for target in live}:
            entry = self._state[name]
            _half_loaded[id(entry)] = weakref.ref(entry)
        self.verdict.half_loaded = half_loaded(self._state)

    def load(self) -> None:
        """Hands what has been filled to the live objects. Precondition: all ranks have what they want."""
        load(self._state, self.match, self._trees)
        for entry in self._state.values():
            _half_loaded.pop(id(entry), None)
