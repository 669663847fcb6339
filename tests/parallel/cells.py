"""Which jobs are restored as which other jobs, and what counts as right."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tests.parallel.jobs import SAVED, Resumed, Saved
from tests.parallel.kinds import KINDS

__all__ = ["PLACES", "TOLERANCE", "Cell", "every_cell", "judge", "loss_error", "short_cells"]

PLACES = ("memory", "storage")
TOLERANCE = 2e-6
"""How far the mean loss of a step may be from that of the unbroken run, as a part of it, where sums are made in another
order. It is of 32 bits, so the next number is 6e-8 to 1.2e-7 of it away."""


@dataclass(frozen=True)
class Cell:
    """A job of ``kind`` on ``ranks`` saves; one of ``new_kind`` on ``new_ranks`` goes on from ``place``."""

    kind: str
    ranks: int
    new_kind: str
    new_ranks: int
    place: str

    @property
    def same(self) -> bool:
        """Whether all arithmetic is done in the same order, so that losses must be equal bit for bit."""
        return (self.kind, self.ranks) == (self.new_kind, self.new_ranks)

    def __str__(self) -> str:
        new = "" if self.new_kind == self.kind else f"{self.new_kind}-"
        return f"{self.kind}-{self.ranks}-to-{new}{self.new_ranks}-{self.place}"


def every_cell() -> list[Cell]:
    """Each kind on all its numbers of ranks, to all; then each kind to each other one, with four ranks or the most
    that it runs on to three or, where it doesn't run on three, the most but two."""
    found = []
    for kind, worlds in KINDS.items():
        found += [Cell(kind, n, kind, m, place) for n, m, place in itertools.product(worlds, worlds, PLACES)]
    for (kind, worlds), (new, others) in itertools.permutations(KINDS.items(), 2):
        found += [Cell(kind, max(worlds), new, 3 if 3 in others else min(others), place) for place in PLACES]
    return found


_SHORT = (
    ("single", 1, "ddp", 3, "storage"),
    ("ddp", 3, "fsdp2+tp", 4, "memory"),
    ("fsdp2", 2, "tp", 3, "memory"),
    ("fsdp2", 2, "fsdp2", 2, "storage"),
    ("tp", 3, "single", 1, "storage"),
    ("fsdp1", 1, "pipeline", 2, "storage"),
    ("pipeline", 2, "fsdp1", 1, "memory"),
    ("fsdp1-orig", 3, "zero1", 2, "memory"),
    ("zero1", 2, "hsdp", 4, "storage"),
    ("hsdp", 4, "fsdp1-orig", 2, "storage"),
    ("hsdp", 4, "hsdp", 4, "memory"),
    ("fsdp2+tp", 4, "fsdp2", 4, "memory"),
)


def short_cells() -> Iterator[Cell]:
    """Every kind saves and is restored, most as another one, grown and shrunk, from both places."""
    return itertools.starmap(Cell, _SHORT)


def judge(cell: Cell, saved: Saved, resumed: Resumed) -> list[str]:
    """What is wrong with a cell; nothing if it is as promised."""
    if resumed.error:
        return [resumed.error]
    wrong = []
    for rank, answer in enumerate(resumed.answers):
        if answer["step"] != SAVED or answer["place"] != cell.place:
            wrong.append(f"rank {rank} went on from step {answer['step']} in {answer['place'] or 'nothing'}")
        owner, seen = answer["notes"]
        if seen != SAVED or owner not in range(cell.ranks):
            wrong.append(f"rank {rank} has the notes of rank {owner} at step {seen}")
        if cell.ranks == cell.new_ranks and (owner != rank or answer["draws"] != saved.answers[rank]["draws"]):
            wrong.append(f"rank {rank} has not its own notes and random generators")
    wrong += resumed.answers[0]["different"]
    if cell.same and resumed.losses != saved.losses:
        wrong.append(f"losses {resumed.losses} are not those of the unbroken run, {saved.losses}")
    if loss_error(saved, resumed) > TOLERANCE:
        wrong.append(f"losses are {loss_error(saved, resumed):.1e} away from those of the unbroken run")
    return wrong


def loss_error(saved: Saved, resumed: Resumed) -> float:
    """The largest relative difference between the two runs' mean losses."""
    pairs = zip(_means(saved.losses), _means(resumed.losses), strict=True)
    return max(abs(new - old) / abs(old) for old, new in pairs)


def _means(losses: list[list[float]]) -> list[float]:
    return [sum(step) / len(step) for step in zip(*losses, strict=True)]
