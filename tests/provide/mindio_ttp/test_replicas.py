"""The choice of the step that is dumped, and of who writes it: a pure function."""

from __future__ import annotations

import pytest

from rekindle.errors import UsageError
from rekindle.provide.mindio_ttp.replicas import Choice, Group, choose, groups_from_json, groups_to_json, parse_groups

HALVES = Group(0, (0, 1, 2, 3), 2)
"""Ranks 0 and 2 hold the same shard, and so do 1 and 3."""


def test_the_first_holder_of_each_shard_writes() -> None:
    assert choose([HALVES], 4, dict.fromkeys(range(4), 7)) == Choice(7, ((0, (0, 1)),))


def test_a_holder_of_the_other_half_stands_in_at_the_place_of_its_shard() -> None:
    """The writers are in the order of the shards, not of the ranks: a program that sorts them mixes them up."""
    assert choose([HALVES], 4, {1: 7, 2: 7, 3: 7}) == Choice(7, ((0, (2, 1)),))


def test_one_rank_writes_what_all_hold() -> None:
    assert choose([Group(0, (0, 1, 2), 3)], 3, {1: 4, 2: 4}) == Choice(4, ((0, (1,)),))


def test_the_newest_step_that_is_whole_is_chosen() -> None:
    assert choose([HALVES], 4, {0: 8, 1: 7, 2: 7, 3: 7}) == Choice(7, ((0, (2, 1)),))
    assert choose([HALVES], 4, {0: 8, 1: 8, 2: 7, 3: 7}) == Choice(8, ((0, (0, 1)),))


def test_nothing_is_chosen_when_a_shard_is_lost() -> None:
    why = choose([HALVES], 4, {0: 7, 2: 7})
    assert isinstance(why, str) and "step 7" in why and "rank(s) 1, 3 held" in why


def test_nothing_is_chosen_when_a_whole_group_is_not_known() -> None:
    """Its ranks have died before they could tell: their part is not left out without a word."""
    why = choose([Group(0, (0, 1), 2)], 4, {0: 7, 1: 7})
    assert isinstance(why, str) and "rank(s) 2, 3 hold" in why


def test_dense_and_expert_groups_are_covered_by_one_step() -> None:
    groups = [HALVES, Group(1, (0, 2), 2), Group(1, (1, 3), 2)]
    assert choose(groups, 4, {1: 7, 2: 7, 3: 7}) == Choice(7, ((0, (2, 1)), (1, (2,)), (1, (1,))))
    assert isinstance(choose(groups, 4, {0: 8, 1: 7, 2: 7, 3: 6}), Choice)
    assert isinstance(choose([HALVES, Group(1, (0,), 1)], 4, {1: 7, 2: 7, 3: 7}), str)


def test_without_a_state_there_is_nothing_to_choose() -> None:
    assert "no rank" in str(choose([HALVES], 4, {}))


def test_groups_survive_json() -> None:
    assert groups_from_json(groups_to_json([HALVES])) == [HALVES]


def test_what_programs_tell() -> None:
    info = [{"rank_list": [0, 2], "replica_cnt": 2, "replica_shift": 0, "type": 1}, {"rank_list": [2], **_ONE}]
    assert parse_groups(2, info) == [Group(0, (0, 2), 2), Group(1, (2,), 1)]


_ONE = {"replica_cnt": 1, "replica_shift": 0}


@pytest.mark.parametrize(
    "entry",
    [
        {"rank_list": [0, 1, 2], "replica_cnt": 2, "replica_shift": 0},
        {"rank_list": [0, 1], "replica_cnt": 2, "replica_shift": 1},
        {"rank_list": [1, 2], **_ONE},
        {"rank_list": [0, 0], **_ONE},
        {"rank_list": "0", **_ONE},
        {"rank_list": [0], "replica_cnt": "1", "replica_shift": 0},
        {"rank_list": [0]},
        3,
    ],
)
def test_what_can_not_be_is_refused(entry: object) -> None:
    """Three ranks with two copies among them: the original cuts 3/2 to 1, and takes one rank for all shards."""
    with pytest.raises(UsageError):
        parse_groups(0, [entry])


@pytest.mark.parametrize("info", [None, [], {}])
def test_no_groups_are_refused(info: object) -> None:
    with pytest.raises(UsageError):
        parse_groups(0, info)
