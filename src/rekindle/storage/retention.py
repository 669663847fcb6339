"""Retention: the pure function that says which durable checkpoints stay."""

from __future__ import annotations

from collections.abc import Sequence

from rekindle.format.lineage import ShardId

__all__ = ["MOST", "surviving"]

MOST = 8
"""Checkpoints that stay where nobody has said how many: enough that each is within a factor of 4 of any age up to some
60 times the interval, for 8 times a checkpoint's bytes on storage."""
_NEWEST = 2
"""The newest ones, which stay by any rule: should the very newest turn out to be damaged, one step is lost."""


def surviving(stands: Sequence[ShardId], keep: int | None, keep_every: int | None) -> set[ShardId]:
    """Those of ``stands``, oldest first, that stay: the newest ``keep`` and multiples of ``keep_every``.

    With neither the newest two and one of each power-of-two age stay, eight at most.
    """
    if keep is None and keep_every is None:
        return set(_spread(stands))
    newest = stands[-max(_NEWEST if keep is None else keep, 1) :]
    return {*newest, *(stamp for stamp in stands if keep_every and stamp.step % keep_every == 0)}


def _spread(stands: Sequence[ShardId]) -> list[ShardId]:
    """Thins out towards the past. Ages are counted in steps, from the newest one.

    Of each power of two the oldest stays: it is the next to be of the power after that, so that pruning at every step
    leaves none without one. Above ``MOST``, the one goes whose neighbours are nearest to each other in age.
    """
    oldest: dict[int, ShardId] = {}
    for stamp in stands[:-_NEWEST]:
        oldest.setdefault((stands[-1].step - stamp.step).bit_length(), stamp)
    stay = [*oldest.values(), *stands[-_NEWEST:]]

    def gap(index: int) -> float:
        older, newer = (stands[-1].step - stay[i].step for i in (index - 1, index + 1))
        return older / max(newer, 1)

    while len(stay) > MOST:
        del stay[min(range(1, len(stay) - _NEWEST), key=gap)]
    return stay
