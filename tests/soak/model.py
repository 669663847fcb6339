"""What must be there: told of all that the job says, and of what befalls it; finds what is lost or wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rekindle.format.lineage import ShardId
from rekindle.storage.catalog import find_copies
from rekindle.storage.posix import PosixStore
from rekindle.storage.verify import verify
from tests.soak.job import Line, Spec

__all__ = ["Model"]


@dataclass
class Model:
    """Training is a function of the step alone, whatever strikes: so one digest per step and rank is all there is."""

    spec: Spec
    losses: list[str] = field(default_factory=list)
    """All that should not have been."""
    durable: int = 0
    """Newest step of which somebody was told that it is on storage."""
    steps: int = 0
    """Trained, by all ranks together, again ones included."""
    stall: float = 0.0
    """Seconds that the longest save held training up for."""
    bytes_verified: int = 0
    checkpoints: set[tuple[int, str]] = field(default_factory=set)
    """Step and start of all that has been seen on storage."""
    _digests: dict[tuple[int, int], str] = field(default_factory=dict)
    """By rank and step."""
    _damaged: set[tuple[int, str]] = field(default_factory=set)
    """What we damaged ourselves, on storage."""

    def lost(self, what: str) -> None:
        self.losses.append(what)

    def hear(self, rank: int, lines: list[Line]) -> None:
        """Of what a rank has written down since."""
        for line in lines:
            known = self._digests.setdefault((rank, line.step), line.digest)
            if known != line.digest:
                self.lost(f"rank {rank}: step {line.step} ({line.what}) differs from what it was before")
            if line.what == "durable":
                self.durable = max(self.durable, line.step)
            self.steps += line.what == "step"
            self.stall = max(self.stall, line.stall)

    def resumed(self, ranks: list[int], promised: int, why: str) -> None:
        """A start went on from these steps."""
        if len(set(ranks)) != 1:
            self.lost(f"after {why}: ranks went on from different steps, {ranks}")
        elif ranks[0] < promised:
            self.lost(f"after {why}: went on from step {ranks[0]}, and {promised} was promised")

    def look(self) -> None:
        """Note what storage offers. Its newest must never go back."""
        found = self._on_storage()
        newest = max((step for step, _ in found), default=0)
        if newest < self.durable:
            self.lost(f"step {self.durable} was durable, and the newest on storage is {newest}")
        self.durable = max(self.durable, newest)

    def _on_storage(self) -> list[tuple[int, str]]:
        stamps = [entry.stamp for entry in PosixStore(self.spec.root).published()]
        found = set(map(_key, stamps))
        self.checkpoints |= found
        return sorted(found - self._damaged)

    def can_spare_one(self) -> bool:
        """Whether storage has two sound checkpoints."""
        return len(self._on_storage()) > 1

    def give_up_newest(self) -> Path:
        """The directory of the newest one, which is to be damaged: the one before is what is left."""
        newest, before = self._on_storage()[:-3:-1]
        self._damaged.add(newest)
        self.durable = before[0]
        found = (entry for entry in PosixStore(self.spec.root).published() if _key(entry.stamp) == newest)
        return Path(str(next(found).files))

    def verify(self) -> None:
        """Read all that storage has."""
        for copy in find_copies(None, PosixStore(self.spec.root)):
            try:
                problems = verify(copy, self._count)
            except FileNotFoundError:  # pruned meanwhile
                continue
            key = _key(copy.stamp)
            if problems and key not in self._damaged:
                self.lost(f"step {copy.step} on storage is damaged: {problems[0]}")
            if not problems and key in self._damaged:
                self.lost(f"step {copy.step} was damaged, and verify does not see it")

    def _count(self, nbytes: int) -> None:
        self.bytes_verified += nbytes


def _key(stamp: ShardId) -> tuple[int, str]:
    return stamp.step, stamp.incarnation.id
