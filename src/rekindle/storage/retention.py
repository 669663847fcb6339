"""Decides which checkpoints stay on storage, durable or unfinished: pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rekindle.format.lineage import ShardId
from rekindle.format.metric import best_of

__all__ = ["MOST_BY_DEFAULT", "surplus_parts", "surviving"]

MOST_BY_DEFAULT = 8
"""Checkpoints that stay by default. With eight, one is within a factor of 4 of any age up to some 60 times the
interval, at a price of 8 times a checkpoint's bytes on storage."""
_NEWEST = 2
"""Newest checkpoints that stay by default: should the newest turn out to be damaged, only one interval is lost."""


def surviving(
    stands: Sequence[ShardId], keep: int | None, keep_every: int | None, *, keep_best: bool = True
) -> set[ShardId]:
    """Returns which of ``stands``, oldest first, stay: the newest ``keep`` and multiples of ``keep_every``.

    Without either, the newest two and one of each power-of-two age stay, eight at most. With ``keep_best`` the best one
    by its metric stays besides.
    """
    best = best_of(stands) if keep_best else None
    also = set() if best is None else {best}
    if keep is None and keep_every is None:
        return {*_spread(stands), *also}
    newest = stands[-max(_NEWEST if keep is None else keep, 1) :]
    return {*newest, *also, *(stamp for stamp in stands if keep_every and stamp.step % keep_every == 0)}


def surplus_parts(
    begun: Mapping[int, Collection[int]], ranks: Collection[int], keep: int, spared: Collection[int] = ()
) -> list[int]:
    """Returns the steps of which the parts of ``ranks`` are to go: ``begun`` has the ranks of each unfinished step.

    The newest ``keep`` stay, those to be ``spared``, and the newest step that each other rank has begun, which may be
    its slow node's present one. A node that is gone, or writes elsewhere, spares one step and no more.
    """
    ours = sorted(step for step, found in begun.items() if not set(ranks).isdisjoint(found))
    others = {rank: step for step in sorted(begun) for rank in begun[step] if rank not in ranks}
    return [step for step in ours[:-keep] if step not in spared and step not in others.values()]


def _spread(stands: Sequence[ShardId]) -> list[ShardId]:
    """Thins out towards the past. Ages are counted in steps from the newest checkpoint.

    The oldest of each power of two stays: it is the first to reach the next power, so that pruning at every step leaves
    no power without one. Above ``MOST_BY_DEFAULT``, the one goes whose neighbours are nearest to each other in age.
    """
    oldest: dict[int, ShardId] = {}
    for stamp in stands[:-_NEWEST]:
        oldest.setdefault((stands[-1].step - stamp.step).bit_length(), stamp)
    stay = [*oldest.values(), *stands[-_NEWEST:]]

    def gap(index: int) -> float:
        older, newer = (stands[-1].step - stay[i].step for i in (index - 1, index + 1))
        return older / max(newer, 1)

    while len(stay) > MOST_BY_DEFAULT:
        del stay[min(range(1, len(stay) - _NEWEST), key=gap)]
    return stay
