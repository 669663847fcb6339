"""One candidate on one rank: open a copy of its shard, and put that, verified, into the live state."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rekindle.errors import CorruptError, RekindleError, StateMismatchError, UsageError
from rekindle.recovery.exchange import exchange
from rekindle.recovery.group import Alone, Group
from rekindle.snapshot.lineage import Incarnation
from rekindle.snapshot.pieces import Reader, pour
from rekindle.snapshot.shard import OpenShard
from rekindle.state.fill import Destinations
from rekindle.state.load import check, load
from rekindle.storage.catalog import MEMORY
from rekindle.storage.verify import check_manifest

__all__ = ["Attempt", "Verdict", "half_loaded"]

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
    """Where the copy in use is; None when none is left."""
    nbytes: int = 0
    read: int = 0
    """Bytes that this rank has read, header included; fewer than ``nbytes`` when others sent it the rest."""
    seconds: float = 0.0
    reasons: list[str] = field(default_factory=list)
    error: RekindleError | None = None
    """Why it must not be loaded though it may be sound; raised on all ranks."""
    half_loaded: bool = False


class Attempt:
    """Use as a context: the copy in use stays open, and in memory pinned, until it ends."""

    def __init__(
        self, state: Mapping[str, Any], key: tuple[int, Incarnation], copies: list[tuple[str, Path]], allow_pickle: bool
    ) -> None:
        self.verdict = Verdict()
        self._state, self._key, self._allow_pickle = state, key, allow_pickle
        self._copies = list(copies)
        self._reader: Reader | None = None
        self._filled: Destinations | None = None

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def open(self) -> None:
        """Open the next copy that fits the live state, nearest first, which is left as it is."""
        self.verdict.place = None
        while self._copies and self.verdict.place is None and self.verdict.error is None:
            place, path = self._copies.pop(0)
            try:
                self._open(place, path)
                self.verdict.place = place
            except (StateMismatchError, UsageError) as error:
                self.verdict.place, self.verdict.error = place, error
            except (OSError, CorruptError) as error:
                self.verdict.reasons.append(f"{place}: {error}")

    def _open(self, place: str, path: Path) -> None:
        self._close()
        if place != MEMORY:
            for problem in check_manifest(path.parent):
                raise problem
        shard = OpenShard.open(path, in_memory=place == MEMORY)
        self._reader = Reader(shard)
        if shard.receipt.stamp.key != self._key:
            raise CorruptError(f"{path}: belongs to another checkpoint")
        check(self._state, shard.receipt, self._allow_pickle)
        if not self._reader.header_is_sound():
            raise shard.complain(-1)
        self._filled = Destinations(shard.receipt, self._state)
        self.verdict.nbytes = shard.receipt.file_bytes

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader.shard.close()
            self._reader = None

    def fill(self, group: Alone | Group, verdicts: list[Verdict]) -> None:
        """Put the copy that is open into place, or the next sound one. ``verdicts`` are those of all ranks."""
        together = isinstance(group, Group) and group.world > 1 and all(v.place != MEMORY for v in verdicts)
        while self.verdict.place is not None and self.verdict.error is None:
            place, reader, filled = self.verdict.place, self._reader, self._filled
            assert reader is not None and filled is not None
            self._mark(filled)
            try:
                left, bad = list(range(len(reader.shard.receipt.checksums))), list[int]()
                if together:
                    together = False  # the other ranks take part once
                    assert isinstance(group, Group)
                    left, bad = exchange(group, reader, filled)
                bad = bad or pour(reader, filled, left)
                if not bad:
                    return
                self.verdict.reasons.append(f"{place}: {reader.shard.complain(bad[0])}")
            except OSError as error:
                self.verdict.reasons.append(f"{place}: {error}")
            finally:
                self.verdict.read += reader.nbytes
            self.open()

    def _mark(self, filled: Destinations) -> None:
        filled.begin()
        for name in set(filled.live.values()):
            entry = self._state[name]
            _half_loaded[id(entry)] = weakref.ref(entry)
        self.verdict.half_loaded = half_loaded(self._state)

    def load(self) -> None:
        """Give the live objects what has been filled. All ranks have a sound copy."""
        assert self._reader is not None and self._filled is not None
        load(self._state, self._reader.shard.receipt, self._filled, self._allow_pickle)
        for entry in self._state.values():
            _half_loaded.pop(id(entry), None)
