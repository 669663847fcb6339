"""Loads a part of a checkpoint on purpose: decides how little is too little, and draws up a table of the result."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from rekindle.common.os_errors import describe_error
from rekindle.common.timeouts import with_timeout
from rekindle.errors import StateMismatchError, UsageError
from rekindle.format.lineage import ShardId
from rekindle.restore.match import Match
from rekindle.state.rng import RngState
from rekindle.state.tree import entries
from rekindle.storage.store import Store

__all__ = ["Counts", "choose_parts", "keep", "refuse_empty", "table", "unloaded"]

log = logging.getLogger("rekindle")

Counts = dict[str, tuple[int, int]]
"""By part of the state: how much of it a checkpoint has, and of how much."""

_PIN = 10.0
"""Seconds that storage gets to pin a checkpoint."""
_LINES = 12
"""Lines of a table for what was left, and as many for what was skipped: a model of other names has thousands."""


def choose_parts(
    wanted: bool | str | Collection[str], strict: bool | None, state: Mapping[str, Any]
) -> frozenset[str] | None:
    """Names the parts of ``state`` to load as far as they match; None when all of it has to match.

    ``wanted`` is restore()'s ``partial``; ``strict`` is the old name of its opposite. Raises UsageError
    for a name that the state doesn't have.
    """
    if strict is not None:
        warnings.warn("restore(strict=False) is now restore(partial=True)", DeprecationWarning, stacklevel=3)
        wanted = wanted or not strict
    if wanted is False:
        return None
    if wanted is True:
        return frozenset(state)
    names = frozenset([wanted] if isinstance(wanted, str) else wanted)
    unknown = sorted(names - set(state), key=repr)
    if unknown or not names:
        have = ", ".join(map(repr, state))
        raise UsageError(f"partial={wanted!r}: must be True, False or names of parts of the state, which are {have}")
    return names


def refuse_empty(step: int, counts: Sequence[Counts], there: Collection[str], parts: frozenset[str]) -> None:
    """Raises StateMismatchError unless something of each part matches on some rank, whose ``counts`` these are.

    ``there`` are the parts of the checkpoint. A run that goes on from nothing would pass for one that was restored, and
    its own checkpoints would replace the good ones.
    """
    wanted, found = set[str](), set[str]()
    for one in counts:
        wanted |= {name for name, (_, of) in one.items() if of}
        found |= {name for name, (fits, _) in one.items() if fits}
    empty = sorted(wanted - found)
    if not empty:
        return
    rest = sorted(parts & found)
    hint = f"restore(partial={rest!r}) loads these parts and leaves the others as they are" if rest else ""
    hint = hint or "restore(step=0) starts anew"
    raise StateMismatchError(
        f"nothing of {_names(empty)} can be loaded from the checkpoint of step {step}, which has {_names(there)}: "
        f"{hint}"
    )


def table(step: int, match: Match) -> str:
    """Draws up the table of what was loaded of each part, what stays as it was, and what was skipped."""
    width = max(map(len, match.state), default=0)
    lines = [f"step {step} was restored in part:"]
    for name, entry in match.state.items():
        fits, of = match.counts.get(name, (0, 0))
        what = f"{fits} of {of} loaded"
        if not match.chosen(name):
            what = "left as it was, because partial= doesn't name it"
        elif name not in match.counts:
            what = "left as it was: not in the checkpoint" if isinstance(entry, RngState) else "empty"
        lines.append(f"  {name:<{width}}  {what}")
    lines += _section("left as it was", sorted([*match.lacking, *match.problems]))
    lines += _section("skipped, not in the live state", sorted(match.surplus))
    return "\n".join(lines)


def unloaded(match: Match) -> set[str]:
    """Names what the checkpoint has, and is not loaded."""
    there = entries(match.saved.home.structure)
    left_out = {repr(name) for name in match.state if name in there and not match.chosen(name)}
    return match.surplus | set(match.problems) | left_out


def keep(store: Store, stamp: ShardId) -> None:
    """Pins a checkpoint that was loaded in part only: this run's own checkpoints have none of the rest."""
    try:
        with_timeout(_PIN, store.root, partial(store.pin, stamp))
    except OSError as error:
        why = "only memory has it" if isinstance(error, FileNotFoundError) else describe_error(error)
        log.warning(
            "step %d was loaded in part and could not be pinned, so retention may remove it: %s", stamp.step, why
        )
        return
    log.warning(
        "step %d is pinned on storage, because a part of it was not loaded: ckpt.unpin(%d) lets retention remove it",
        *(stamp.step, stamp.step),
    )


def _section(title: str, found: list[str]) -> Iterable[str]:
    if found:
        yield f"  {title} ({len(found)}):"
        yield from (f"    {one}" for one in found[:_LINES])
        if len(found) > _LINES:
            yield f"    and {len(found) - _LINES} more"


def _names(names: Collection[str]) -> str:
    some = sorted(names, key=repr)[:_LINES]
    return ", ".join(map(repr, some)) + (f" and {len(names) - len(some)} more" if len(names) > len(some) else "")
