"""Describes which ranks hold copies of an optimizer's shards, as programs tell it by ``tft_set_optimizer_replica``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from rekindle.errors import UsageError

__all__ = ["DENSE", "Choice", "Group", "choose", "groups_from_json", "groups_to_json", "parse_groups"]

DENSE = 0
"""Type of the groups of a model's dense part: the first entry of what a rank tells. The next one is of experts."""


@dataclass(frozen=True)
class Group:
    """One data-parallel group. Its ranks, in order, are ``copies`` parts, each of which holds all shards once."""

    kind: int
    """Value of ``OptimizerType``."""
    ranks: tuple[int, ...]
    copies: int

    def holders(self) -> list[tuple[int, ...]]:
        """Returns the ranks that hold each shard."""
        shards = len(self.ranks) // self.copies
        return [self.ranks[shard::shards] for shard in range(shards)]


@dataclass(frozen=True)
class Choice:
    """The step that is dumped, and who writes it."""

    step: int
    groups: tuple[tuple[int, tuple[int, ...]], ...]
    """Type of each group, and the ranks that write its shards, in the order of the shards."""


def parse_groups(rank: int, info: Any) -> list[Group]:
    """Returns the groups of ``replica_info``. Raises UsageError for one that can't be, or whose meaning isn't known."""
    if not isinstance(info, list) or not info:
        raise UsageError(f"replica_info is {info!r}: must be a list of one dict for each type of optimizer")
    return [_parse(rank, kind, entry) for kind, entry in enumerate(info)]


def _parse(rank: int, kind: int, entry: Any) -> Group:
    where = f"replica_info[{kind}]"
    if not isinstance(entry, dict):
        raise UsageError(f"{where} is {entry!r}: must be a dict of rank_list, replica_cnt and replica_shift")
    ranks, copies, shift = (entry.get(name) for name in ("rank_list", "replica_cnt", "replica_shift"))
    if not isinstance(ranks, list) or not ranks or not all(type(one) is int and one >= 0 for one in ranks):
        raise UsageError(f"{where}: rank_list is {ranks!r}: must be a list of ranks")
    if rank not in ranks or len(set(ranks)) != len(ranks):
        raise UsageError(f"{where}: rank_list is {ranks}: must hold rank {rank}, and each rank once")
    if type(copies) is not int or not 1 <= copies <= len(ranks) or len(ranks) % copies:
        raise UsageError(
            f"{where}: replica_cnt is {copies!r}, for {len(ranks)} ranks: must divide their number, or some shards "
            "would have fewer copies than others"
        )
    if shift != 0:
        raise UsageError(f"{where}: replica_shift is {shift!r}: only 0 is known here")
    return Group(kind, tuple(sorted(ranks)), copies)


def choose(groups: Collection[Group], world: int, steps: Mapping[int, int]) -> Choice | str:
    """Returns the newest step of which every shard has a holder, or words on why there is none.

    ``steps`` maps each rank whose state can be read to the step that it is of. Of several holders the first is taken,
    as the original does: programs gather by its order.
    """
    known = {rank for group in groups if group.kind == DENSE for rank in group.ranks}
    if untold := sorted(set(range(world)) - known):
        return f"nobody has told which ranks hold copies of what rank(s) {_listed(untold)} hold"
    why = "no rank has a complete step that can be read"
    ordered = sorted(groups, key=lambda group: (group.kind, group.ranks))
    for step in sorted(set(steps.values()), reverse=True):
        lost = [
            rank for group in ordered for shard in group.holders() if _first(shard, steps, step) < 0 for rank in shard
        ]
        if not lost:
            writers = (tuple(_first(shard, steps, step) for shard in group.holders()) for group in ordered)
            return Choice(step, tuple(zip((group.kind for group in ordered), writers, strict=True)))
        if why.startswith("no rank"):
            why = (
                f"of step {step} some shards are lost: nobody else holds what rank(s) {_listed(sorted(set(lost)))} held"
            )
    return why


def _first(holders: tuple[int, ...], steps: Mapping[int, int], step: int) -> int:
    """Returns the first of ``holders`` at ``step``; -1 if there is none."""
    return next((rank for rank in holders if steps.get(rank) == step), -1)


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def groups_to_json(groups: Collection[Group]) -> list[Any]:
    """Returns groups as JSON holds them."""
    return [[group.kind, list(group.ranks), group.copies] for group in groups]


def groups_from_json(value: Any) -> list[Group]:
    """Returns the groups of ``groups_to_json``."""
    return [Group(kind, tuple(ranks), copies) for kind, ranks, copies in value]
