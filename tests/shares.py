"""Deals the campaigns out to shares: ``--campaign-share=3/10`` runs the default tests and the third of ten shares.

The campaigns take longer than a change can wait for. ``.ci/run`` runs one share of them with each commit, so that each
campaign runs once in so many commits. Shares are even in the seconds that campaigns say: those of CI's log, where four
tests run at a time on two cores. One that takes longer than a share can't be dealt evenly: make it several.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest

__all__ = ["deal", "may_be_skipped", "parse", "put_longest_first", "seconds_of"]

_SECONDS = 5.0
"""Seconds that a campaign takes which doesn't say: ``@pytest.mark.campaign(seconds=60)`` does."""


def parse(text: str) -> tuple[int, int]:
    """Share and number of shares of ``3/10``. Any number is a share: that of a day or of a commit is taken modulo."""
    share, _, shares = text.partition("/")
    if not (share.isdigit() and shares.isdigit() and int(shares) > 0):
        raise pytest.UsageError(f"--campaign-share={text}: give a number and how many shares there are, such as 3/10")
    return int(share) % int(shares), int(shares)


def deal(costs: Iterable[tuple[str, float]], shares: int, last: Collection[str] = ()) -> dict[str, int]:
    """The share of each test, by its name and its seconds.

    The dearest is dealt first, each to the share that costs least so far: no share takes longer than the mean and one
    test. A hash of the name would put several long ones into one share. The same tests are always dealt the same way.
    ``last`` are dealt behind all others, so that shares are even without them, too.
    """
    found, totals = dict[str, int](), [0.0] * shares
    for name, cost in sorted(costs, key=lambda one: (one[0] in last, -one[1], one[0])):
        found[name] = totals.index(min(totals))
        totals[found[name]] += cost
    return found


def seconds_of(item: pytest.Item) -> float | None:
    """About how long a campaign takes, in seconds; None for a test that is none."""
    marker = item.get_closest_marker("campaign")
    return None if marker is None else _seconds(*marker.args, **marker.kwargs)


def _seconds(seconds: float = _SECONDS) -> float:
    return float(seconds)


def may_be_skipped(makefile: str) -> set[str]:
    """Returns the files of tests that need environments of their own, which CI may not have: those of OWN."""
    (own,) = re.findall(r"^OWN := (.*)$", makefile, re.MULTILINE)
    found = (re.findall(rf"^TESTS_{name} *:= *(.*)$", makefile, re.MULTILINE) for name in own.split())
    return {file for files in found for file in " ".join(files).split()}


def put_longest_first(items: list[pytest.Item]) -> None:
    """Sorts files by the seconds of their campaigns: one that is begun late may run on when all others have ended."""
    seconds = dict[Path, float]()
    for item in items:
        seconds[item.path] = seconds.get(item.path, 0.0) + (seconds_of(item) or 0.0)
    items.sort(key=lambda item: -seconds[item.path])
