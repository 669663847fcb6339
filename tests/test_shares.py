"""The campaigns are dealt out so that each runs once, and no share takes much longer than another."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.shares import deal, may_be_skipped, parse, put_longest_first, seconds_of

COSTS = {f"test_{number}": 5.0 for number in range(40)} | {"test_long": 60.0, "test_longer": 90.0}


def test_each_campaign_is_in_one_share_and_no_share_costs_more_than_the_mean_and_one_test() -> None:
    dealt = deal(COSTS.items(), 10)
    assert dealt.keys() == COSTS.keys()
    totals = [sum(COSTS[name] for name, share in dealt.items() if share == number) for number in range(10)]
    assert min(totals) > 0 and max(totals) <= sum(COSTS.values()) / 10 + max(COSTS.values())
    assert dealt == deal(reversed(COSTS.items()), 10), "the order of the tests doesn't matter"


def test_shares_are_even_without_those_that_may_be_skipped() -> None:
    rare = {f"test_rare_{number}": 55.0 for number in range(7)}
    dealt = deal((COSTS | rare).items(), 10, rare)
    assert {name: dealt[name] for name in COSTS} == deal(COSTS.items(), 10)
    totals = [sum((COSTS | rare)[name] for name, share in dealt.items() if share == number) for number in range(10)]
    assert max(totals) <= sum((COSTS | rare).values()) / 10 + max(COSTS.values())


def test_files_of_frameworks_with_environments_of_their_own_may_be_skipped() -> None:
    repo = Path(__file__).parents[1]
    found = may_be_skipped((repo / "Makefile").read_text())
    assert {"tests/integrations/test_accelerate.py", "tests/integrations/test_ray.py"} < found
    assert "tests/integrations/test_lightning.py" not in found
    assert not [file for file in found if not (repo / file).exists()]


def test_a_share_is_any_number() -> None:
    assert parse("3/10") == (3, 10) and parse("1234/10") == (4, 10)
    for odd in ("", "3", "3/0", "/10", "-1/10"):
        with pytest.raises(pytest.UsageError, match="campaign-share"):
            parse(odd)


def test_files_with_long_campaigns_come_first_and_none_is_torn() -> None:
    def some(path: str, *seconds: float | None) -> list[Any]:
        marks = [None if one is None else pytest.mark.campaign(seconds=one).mark for one in seconds]
        return [SimpleNamespace(path=Path(path), get_closest_marker=lambda name, mark=mark: mark) for mark in marks]

    items = [*some("a", None, None), *some("b", None, 5.0, None), *some("c", None), *some("d", 400.0, None)]
    put_longest_first(items)
    assert [str(item.path) for item in items] == [*"dd", *"bbb", *"aa", *"c"]


@pytest.mark.parametrize("marker", [pytest.mark.campaign(60), pytest.mark.campaign(seconds=60)])
def test_a_campaign_says_its_seconds_with_and_without_the_name(marker: pytest.MarkDecorator) -> None:
    item: Any = SimpleNamespace(get_closest_marker=lambda name: marker.mark)
    assert seconds_of(item) == 60.0
