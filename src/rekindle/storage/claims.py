"""Reads, makes and checks the claims of a job's starts at its root. ``rekindle.format.claim`` has the rule.

Claims are numbered, and each is made by an exclusive create of the number after the newest one that its start has seen.
So between a start's look and its claim there is no other: of two that want one number, one gets it, and the other one
looks again. Nobody changes a claim.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from dataclasses import replace

from rekindle.errors import FormatError
from rekindle.format.claim import LONGEST_CLAIM, Claim, Starts, describe_claim, is_in_the_way, may_follow
from rekindle.format.names import CLAIMS, claim_name, parse_claim_name
from rekindle.storage.store import Store

__all__ = ["claim_root", "hold_claim", "newest_claim"]

_RACES = 20
"""Attempts at a claim while others make theirs, and at a read while others prune."""
_KEPT = 8
"""Newest claims that stay. Only the newest one counts: the others are for people."""


def newest_claim(store: Store) -> Claim | None:
    """Returns the claim of the highest number; None where there is none. Raises OSError.

    One that can't be read counts as that of a start that nobody remembers.
    """
    for _ in range(_RACES):
        numbers = _numbers(store)
        if not numbers:
            return None
        name = claim_name(numbers[-1])
        try:
            claim = Claim.decode(store.read_extra(name, LONGEST_CLAIM), f"{store.root}/{name}")
            return replace(claim, number=numbers[-1])
        except FileNotFoundError:
            continue  # newer ones have come, and it was pruned
        except FormatError:
            return Claim("", 0, numbers[-1])
    raise _race(store)


def claim_root(store: Store, starts: Starts, *, make: bool = True) -> tuple[Claim, Claim | None]:
    """Claims the root for ``starts.own``, by the rule of who may go on. Returns its claim, and the one in its way.

    The second is None where it may. The first has the generation that this start is to have, says after which other
    claim it comes, and has its number once it is made: without ``make`` only if the root has been claimed before.
    Raises OSError.
    """
    own = starts.own
    for _ in range(_RACES):
        newest = newest_claim(store)
        if newest is not None and newest.start == own.start:
            return newest, None
        if newest is not None:
            own = replace(own, generation=max(own.generation, newest.generation + 1))
            if not may_follow(newest, own, starts.past):
                return own, newest
            own = replace(own, after=newest.number)
        made = _make(store, own, newest) if make or newest is not None else own
        if made is not None:
            return made, None
    raise _race(store)


def hold_claim(store: Store, starts: Starts, *, make: bool = True) -> None:
    """Returns if ``starts.own`` has the newest claim, and makes it first if it has none and may. For each commit.

    Without ``make`` it has to be enough that no other start has the newest one: the mount may have gone meanwhile, and
    nothing may be written in its place. While the ranks meet, what a start before left in memory may still be written:
    none is made then. Raises FileExistsError where another start has claimed the root since: this one writes no more.
    Raises OSError.
    """
    own = starts.own
    for _ in range(_RACES):
        newest = newest_claim(store)
        if newest is not None and newest.start == own.start:
            return
        if newest is not None and is_in_the_way(newest, own, starts.past):
            why = (
                f"the job goes on elsewhere, by {describe_claim(newest)}, so nothing of this start is written there "
                "any more, and one of the two has to end"
            )
            raise FileExistsError(errno.EEXIST, why, str(store.root))
        if not (make and starts.settled) or _make(store, own, newest) is not None:
            return
    raise _race(store)


def _make(store: Store, own: Claim, newest: Claim | None) -> Claim | None:
    """Makes a claim right after the ``newest`` one, and removes an old one. None where another start was first.

    Where claims were removed with the root, numbers go on as if they were there.
    """
    claim = replace(own, number=max(newest.number if newest is not None else 0, own.after) + 1)
    try:
        store.write_extra(claim_name(claim.number), claim.encode(), exclusive=True)
    except FileExistsError:
        return None
    if claim.number > _KEPT:
        with suppress(OSError):  # the claim counts all the same
            store.take_away(claim_name(claim.number - _KEPT))
    return claim


def _numbers(store: Store) -> list[int]:
    """Returns the numbers of all claims, in order."""
    found = (parse_claim_name(name) for name in store.extras(CLAIMS))
    return sorted(number for number in found if number is not None)


def _race(store: Store) -> OSError:
    return OSError(errno.EAGAIN, "other starts keep claiming it", str(store.root))
