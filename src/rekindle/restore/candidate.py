"""One candidate on one rank: find all that the live state wants of it, and put that, verified, in its place."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from rekindle.errors import RekindleError, StateMismatchError, UsageError
from rekindle.format.boxes import Box
from rekindle.format.completeness import tensor_names
from rekindle.format.layout import block_ranges
from rekindle.format.lineage import CheckpointKey
from rekindle.format.reader import read_blocks
from rekindle.format.receipt import Receipt
from rekindle.restore.broadcast import Errand, exchange
from rekindle.restore.fill import Filling, Sides, begin
from rekindle.restore.load import build, check_values, load
from rekindle.restore.match import Match, mismatch
from rekindle.restore.partial import Counts, table, unloaded
from rekindle.restore.reshard import Have, ReadPlan, plan
from rekindle.restore.saved import Saved
from rekindle.restore.sources import ShardSource, Sources
from rekindle.session.group import ProcessGroup, SingleProcess
from rekindle.state.tree import entries
from rekindle.storage.catalog import MEMORY, STORAGE, StoredCopy

__all__ = ["Candidate", "Verdict", "half_loaded"]

log = logging.getLogger("rekindle")

_half_loaded: dict[int, weakref.ref[Any]] = {}
"""By id: modules and optimizers that a load has begun to write into, and none has completed since."""


def half_loaded(state: Mapping[str, Any]) -> bool:
    """Whether a part of the live state is neither what it was nor what a checkpoint holds."""
    marks = [_half_loaded.get(id(entry)) for entry in state.values()]
    return any(mark is not None and mark() is entry for mark, entry in zip(marks, state.values(), strict=True))


@dataclass
class Verdict:
    """What came of one candidate on one rank, so far. ``reasons`` tell why copies were passed over."""

    place: str | None = None
    """Where all that is wanted is, storage if a part of it is there; None when it is not to be had."""
    nbytes: int = 0
    """Of the blocks that hold what is wanted."""
    read: int = 0
    """Bytes that this rank has read, headers included; fewer than ``nbytes`` when others sent it the rest."""
    seconds: float = 0.0
    reasons: list[str] = field(default_factory=list)
    error: RekindleError | None = None
    """Why it must not be loaded though it may be sound; raised on all ranks."""
    surplus: set[str] = field(default_factory=set)
    """What this rank's part of the checkpoint has, and its live state has no place for. Somebody else's may."""
    half_loaded: bool = False
    counts: Counts = field(default_factory=dict)
    """How much of each entry of the live state fits."""
    there: set[str] = field(default_factory=set)
    """Entries of the checkpoint."""
    table: str = ""
    """What is loaded and what isn't, for people, where not all has to fit."""
    unloaded: set[str] = field(default_factory=set)
    """What this rank's part of the checkpoint has, and is not loaded here. Somebody else may load it."""


class Candidate:
    """Use as a context: what is in use stays open, and in memory pinned, until it ends."""

    def __init__(
        self,
        state: Mapping[str, Any],
        key: CheckpointKey,
        copies: Sequence[StoredCopy],
        ranks: tuple[int, int],
        allow_pickle: bool,
        parts: frozenset[str] | None = None,
    ) -> None:
        """``ranks``: this rank and the number of all. Values, and what each rank has of its own, come from the shard of
        this rank, modulo the number of shards. ``parts``: entries of the state to load as far as they fit; None when
        all has to fit."""
        self.verdict = Verdict()
        self._key = key
        self._state, self._allow_pickle, self._parts = state, allow_pickle, parts
        saved = copies[0].world if copies else ranks[1]
        self._resized = saved != ranks[1]
        self._sources = Sources(key, copies, ranks[0] % saved)
        self._fit: Match | None = None
        self._jobs: list[tuple[ShardSource, Filling]] = []
        self._trees: dict[str, Any] = {}

    def __enter__(self) -> Candidate:
        return self

    def __exit__(self, *exc: object) -> None:
        self._sources.close()

    @property
    def fit(self) -> Match:
        assert self._fit is not None
        return self._fit

    def open(self) -> None:
        """Find what the live state wants, which is left as it is."""
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
            self.verdict.place = MEMORY if all(job[0].place == MEMORY for job in self._jobs) else STORAGE
            self.verdict.nbytes = sum(filling.nbytes for _, filling in self._jobs)
            self.verdict.surplus, self.verdict.counts = self.fit.surplus, self.fit.counts
            self.verdict.there = set(entries(self.fit.saved.home.structure))
            if self._parts is not None:
                self.verdict.table = table(self._key[0], self.fit)
                self.verdict.unloaded = unloaded(self.fit)

    def _find(self) -> bool:
        """Look at more and more shards, until they have all that is wanted, or there are no more."""
        home = self._sources.home
        if home is None:
            return False
        receipt = home.reader.shard.receipt
        check_values(receipt, self._allow_pickle, self._state)
        if not {chunk.name for chunk in receipt.layout.chunks}.issuperset(tensor_names(receipt.structure)):
            self._sources.more()  # it shared the work: nothing can be told without the others
        while True:
            saved = Saved(receipt)
            for source in self._sources.opened:
                if source is not home:
                    saved.add(source.reader.shard.receipt)
            fit = self._fit = Match(self._state, saved, self._parts)
            wants = fit.wants
            haves = self._haves(receipt)
            found = plan([want for _, want, _ in wants], [have for _, _, have in haves])
            if fit.problems and self._parts is None:
                raise mismatch(fit.problems)
            if not (found.missing or fit.absent or fit.lacking or fit.unsure) or not self._sources.more():
                break
        if not self._whole(fit, found):
            return False
        self._aim(found, wants, haves)
        self._check_ambiguity(fit)
        return True

    def _haves(self, home: Receipt) -> list[tuple[ShardSource, int, Have]]:
        """All parts that there are. What each rank has of its own is this rank's, however near another's may be; what
        this rank has no part of may be that of ranks that share a tensor with it."""
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

    def _whole(self, fit: Match, found: ReadPlan) -> bool:
        """Whether nothing is missing. Raises StateMismatchError for what only the live state has."""
        if fit.lacking and self._parts is None:
            raise mismatch([f"{name}: only in the live state" for name in fit.lacking])
        unseen = self._sources.unseen if fit.unsure else []
        if unseen:
            self._sources.reasons.append(
                f"what optimizers kept of some parameters may be in the shards of rank(s) {unseen}, which can't be read"
            )
        self._sources.reasons += fit.saved.conflicts[:1]
        for name in fit.absent[:1]:
            self._sources.reasons.append(f"no shard that can be read has any of {name}")
        for want in found.missing[:1]:
            self._sources.reasons.append(f"no shard that can be read has {want.name}{want.box}")
        return not (fit.absent or found.missing or unseen or fit.saved.conflicts)

    def _aim(self, found: ReadPlan, wants: Sequence[Any], haves: Sequence[tuple[ShardSource, int, Have]]) -> None:
        sides = Sides()
        fillings: dict[ShardSource, Filling] = {}
        for move in found.moves:
            source, number, _ = haves[move.have]
            _, want, tensor = wants[move.want]
            if source not in fillings:
                fillings[source] = Filling(source.reader.shard.receipt.layout, sides)
            fillings[source].want(number, move.box, want.box, tensor)
        self._jobs = list(fillings.items())

    def _check_ambiguity(self, fit: Match) -> None:
        """Raise StateMismatchError if ranks had different parameters by one name, and are other ranks now."""
        if not self._resized:
            return
        own = {c.name for s in self._sources.opened for c in s.reader.shard.receipt.layout.chunks if c.own}
        if not own & fit.parameters:
            return
        while self._sources.more():
            pass
        seen: dict[str, dict[Box, tuple[int, list[str]]]] = {}
        for source in self._sources.opened:
            receipt = source.reader.shard.receipt
            sums = iter(receipt.checksums)
            for chunk in receipt.layout.chunks:
                digests = list(islice(sums, len(block_ranges(chunk))))
                if chunk.own and chunk.name in fit.parameters:
                    known = seen.setdefault(chunk.name, {})
                    box = chunk.box
                    met = next((other for other in known if other != box and other.intersect(box) is not None), box)
                    rank, other = known.setdefault(met, (source.rank, digests))
                    if other != digests or met != box:
                        raise StateMismatchError(
                            f"{chunk.name}: ranks {rank} and {source.rank}, which saved it, had different tensors by "
                            "this name, and another number of ranks can't tell whose is whose"
                        )

    def fill(self, group: SingleProcess | ProcessGroup, verdicts: list[Verdict]) -> None:
        """Put what is wanted in its place. A copy that turns out damaged is dropped, and others are looked for.

        ``verdicts`` are those of all ranks.
        """
        together = isinstance(group, ProcessGroup) and group.world > 1 and all(v.place != MEMORY for v in verdicts)
        while self.verdict.place is not None and self.verdict.error is None:
            self._mark()
            jobs = [Errand(source.reader, filling, filling.blocks) for source, filling in self._jobs]
            if together:
                together = False  # the other ranks take part once
                assert isinstance(group, ProcessGroup)
                exchange(group, jobs)
            if self._pour(jobs):
                for _, filling in self._jobs:
                    filling.settle()
                self._make_trees()
                return
            self.open()

    def _make_trees(self) -> None:
        """While the other ranks can still be told of what goes wrong."""
        try:
            self._trees = build(self._state, self.fit, self._allow_pickle)
        except Exception as error:
            self.verdict.place = None
            self.verdict.reasons.append(self._nonsense(error))

    def _nonsense(self, error: Exception) -> str:
        home = self._sources.home
        where = f"{home.reader.shard.path}: " if home is not None else ""
        return f"{where}makes no sense: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"

    def _pour(self, jobs: list[Errand]) -> bool:
        """Read what is left. False when a source had to be dropped."""
        sound = True
        for job, (source, _) in zip(jobs, self._jobs, strict=True):
            try:
                bad = job.damaged or read_blocks(job.reader, job.sink, job.left)
                if bad:
                    raise job.reader.shard.corruption(bad[0])
            except (OSError, RekindleError) as error:
                self._sources.drop(source, error)
                sound = False
            finally:
                self.verdict.read += job.reader.nbytes
                job.reader.nbytes = 0
        return sound

    def _mark(self) -> None:
        live = [target for target in self.fit.targets.values() if target.live]
        begin(tensor for target in live for _, tensor in target.pieces)
        for name in {target.entry for target in live}:
            entry = self._state[name]
            _half_loaded[id(entry)] = weakref.ref(entry)
        self.verdict.half_loaded = half_loaded(self._state)

    def load(self) -> None:
        """Give the live objects what has been filled. All ranks have what they want."""
        load(self._state, self.fit, self._trees)
        for entry in self._state.values():
            _half_loaded.pop(id(entry), None)
