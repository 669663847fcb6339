"""Reads, makes and checks the claims of a job's starts at its root. ``rekindle.format.claim`` has the rule.

Claims are numbered, and each is made by an exclusive create of the number after the newest one that its start has seen.
So between a start's look and its claim there is no other: of two that want one number, one gets it, and the other one
looks again. Nobody changes a claim.

A file system without hard links shows a claim before all of it is there. One that its start does not finish, because it
was killed or the power failed, is passed over: its number is taken, and the claim before it counts.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rekindle.errors import FormatError
from rekindle.format.claim import (
    LONGEST_CLAIM,
    Claim,
    Starts,
    describe_conflict,
    is_in_the_way,
    is_unfinished,
    may_follow,
)
from rekindle.format.names import CLAIMS, claim_name, parse_claim_name
from rekindle.storage import disk
from rekindle.storage.store import Store

__all__ = ["claim_root", "describe_obstacle", "hold_claim", "newest_claim", "remove_temporary_claims"]

_RACES = 20
"""Attempts at a claim while others make theirs, and at a read while others prune."""
_KEPT = 8
"""Newest claims that stay. Only the newest one counts: the others are for people."""
_FINISHED_WITHIN = 1.0
"""Seconds in which a start finishes the claim that it has begun: one write of some hundred bytes. Passing over one that
takes longer lets no two starts write: whoever claims next has the newest number, which each commit looks for."""
_LOOK_EVERY = 0.02


def newest_claim(store: Store) -> Claim | None:
    """Returns the claim that counts, the finished one of the highest number; None where there is none. Raises OSError.

    One that can't be read counts as that of a start that nobody remembers.
    """
    return _look(store)[0]


def claim_root(store: Store, starts: Starts, *, make: bool = True) -> tuple[Claim, Claim | None]:
    """Claims the root for ``starts.own``, by the rule of who may go on. Returns its claim, and the one in its way.

    The second is None where it may. The first has the generation that this start is to have, says after which other
    claim it comes, and has its number once it is made: without ``make`` only if the root has been claimed before.
    Raises OSError.
    """
    own = starts.own
    for _ in range(_RACES):
        newest, taken = _look(store)
        if newest is not None and newest.start == own.start:
            return newest, None
        if newest is not None:
            own = replace(own, generation=max(own.generation, newest.generation + 1))
            if not may_follow(newest, own, starts.past):
                return own, newest
            own = replace(own, after=newest.number)
        made = _make(store, own, taken) if make or taken else own
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
        newest, taken = _look(store)
        # After an unfinished one it claims anew, so that the next commit does not wait for that again.
        if newest is not None and newest.start == own.start and newest.number == taken:
            return
        if newest is not None and is_in_the_way(newest, own, starts.past):
            why = (
                f"{describe_conflict(newest, starts.remembered)}, so nothing of this start is written there any more: "
                "see that only one of the two runs, and start the job again, which says how to go on"
            )
            raise FileExistsError(errno.EEXIST, why, str(store.root))
        if not (make and starts.settled) or _make(store, own, taken) is not None:
            return
    raise _race(store)


def describe_obstacle(store: Store) -> str | None:
    """Returns why the root can't be claimed as it is, and what to do; None where it can be. Raises OSError."""
    place = f"{store.root}/{CLAIMS}"
    try:
        store.extras(CLAIMS)
        what = "is a link that leads nowhere" if os.path.islink(place) and not os.path.exists(place) else None
    except NotADirectoryError:
        what = "is no directory"
    if what is None:
        return None
    return f"{place}: {what}, and starts claim their root in a directory of this name: give what is there another name"


def remove_temporary_claims(root: Path) -> None:
    """Removes what was to be a claim, of a number that is taken: its writer was killed there, or comes too late.

    Those of numbers that are free may be of writers that live.
    """
    directory = root / CLAIMS
    names = sorted(path.name for path in directory.glob("claim-*.json") if parse_claim_name(f"{CLAIMS}/{path.name}"))
    for path in directory.glob(".claim-*.tmp"):
        if names and path.name[1 : len(names[-1]) + 1] <= names[-1]:
            disk.unlink(path)


def _look(store: Store) -> tuple[Claim | None, int]:
    """Returns the claim that counts, and the highest number that is taken, 0 for none."""
    for _ in range(_RACES):
        numbers = _numbers(store)
        with suppress(FileNotFoundError):  # newer ones have come, and it was pruned
            found = (_read(store, number) for number in reversed(numbers))
            return next((claim for claim in found if claim is not None), None), max(numbers, default=0)
    raise _race(store)


def _read(store: Store, number: int) -> Claim | None:
    """Reads a claim. None for one that nobody finishes, which is known after a wait. Raises OSError."""
    name = claim_name(number)
    until = time.monotonic() + _FINISHED_WITHIN
    try:
        data = store.read_extra(name, LONGEST_CLAIM)
        while is_unfinished(data):
            if time.monotonic() > until:
                return None
            time.sleep(_LOOK_EVERY)
            data = store.read_extra(name, LONGEST_CLAIM)
        return replace(Claim.decode(data, f"{store.root}/{name}"), number=number)
    except FormatError:
        return Claim("", 0, number)


def _make(store: Store, own: Claim, taken: int) -> Claim | None:
    """Makes a claim of the number after ``taken``, and removes an old one. None where another start was first.

    Where claims were removed with the root, numbers go on as if they were there.
    """
    claim = replace(own, number=max(taken, own.after) + 1)
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
    return OSError(errno.EAGAIN, describe_obstacle(store) or "other starts keep claiming it", str(store.root))
