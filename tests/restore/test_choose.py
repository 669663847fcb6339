"""Which checkpoint to continue from."""

from __future__ import annotations

import logging

from hypothesis import given
from hypothesis import strategies as st

from rekindle.format.lineage import Incarnation
from rekindle.restore.choose import choose
from rekindle.restore.restore import _explain
from rekindle.session.inventory import Offer

FIRST = Incarnation(1, "a" * 16)


def later(generation: int, parent_step: int, name: str = "b") -> Incarnation:
    return Incarnation(generation, name * 16, "a" * 16, parent_step)


def offer(step: int, incarnation: Incarnation = FIRST, *places: str) -> Offer:
    return Offer(step, incarnation, 2, places or ("memory",))


def blind(step: int, incarnation: Incarnation = FIRST) -> Offer:
    """A checkpoint of which a rank sees other ranks' shards only."""
    return Offer(step, incarnation, 2, ())


def test_the_newest_step_that_all_ranks_have_comes_first():
    choice = choose([[offer(1), offer(2), offer(3)], [offer(3), offer(2), offer(1)]])
    assert choice.candidates == [(3, FIRST), (2, FIRST), (1, FIRST)]
    assert not choice.rejected


def test_a_step_that_one_rank_lacks_is_rejected_and_the_rank_is_named():
    choice = choose([[offer(1), offer(2)], [offer(1)]])
    assert choice.candidates == [(1, FIRST)]
    assert choice.rejected.keys() == {(2, FIRST)}
    assert "incomplete" in choice.rejected[2, FIRST] and "rank 1 of 2" in choice.rejected[2, FIRST]


def test_seeing_only_other_ranks_shards_is_lacking_the_step():
    choice = choose([[offer(1), offer(2)], [offer(1), blind(2)]])
    assert choice.candidates == [(1, FIRST)]


def test_each_rank_may_read_from_another_place():
    choice = choose([[offer(2, FIRST, "memory")], [offer(2, FIRST, "storage")]])
    assert choice.candidates == [(2, FIRST)]


def test_the_same_step_of_two_incarnations_is_never_mixed():
    """Half the ranks committed step 5, the job went on from 4, and the other half died at step 5 as well."""
    second = later(2, 4)
    ranks = [[offer(4), offer(5)], [offer(4), offer(5, second)]]
    choice = choose(ranks)
    assert choice.candidates == [(4, FIRST)]
    assert choice.rejected.keys() == {(5, FIRST), (5, second)}
    assert "incomplete" in choice.rejected[5, second]


def test_the_younger_of_two_complete_checkpoints_of_one_step_is_taken():
    second = later(2, 4)
    choice = choose([[offer(5), offer(5, second)]] * 2)
    assert choice.candidates == [(5, second)]
    assert "superseded" in choice.rejected[5, FIRST]


def test_steps_that_a_later_incarnation_left_behind_are_out_though_newer():
    second = later(2, 3)
    choice = choose([[offer(3), offer(9), offer(4, second)]])
    assert choice.candidates == [(4, second), (3, FIRST)]
    assert "step 3" in choice.rejected[9, FIRST] and "generation 2" in choice.rejected[9, FIRST]


def test_steps_in_memory_that_a_job_beside_this_one_left_behind_are_told_of_as_a_loss(caplog):
    second = later(2, 3)
    offers = [offer(3), offer(7, FIRST, "storage"), offer(9), offer(4, second)]
    choice = choose([offers, [*offers[:2], offer(9, FIRST, "peer"), offers[3]]])
    assert choice.left == {(9, FIRST)}
    assert not choose([offers, [*offers[:2], blind(9), offers[3]]]).left, "nobody could have gone on from it"
    with caplog.at_level(logging.INFO, "rekindle"):
        _explain(0, choice, choice.candidates[0], [])
    assert [(record.levelname, record.args[0]) for record in caplog.records] == [
        ("WARNING", "step 9 of generation 1"),
        ("INFO", "step 7 of generation 1"),
    ]


def test_what_one_rank_knows_of_a_successor_counts_for_all():
    second = later(2, 3)
    choice = choose([[offer(3), offer(9)], [offer(3), offer(9), blind(4, second)]])
    assert choice.candidates == [(3, FIRST)]


def test_a_fresh_start_leaves_everything_behind():
    fresh = Incarnation(2, "c" * 16)
    assert choose([[offer(7), offer(1, fresh)]]).candidates == [(1, fresh)]


def test_an_asked_for_step_is_the_only_candidate():
    choice = choose([[offer(1), offer(2), offer(3)]], step=2)
    assert choice.candidates == [(2, FIRST)] and not choice.rejected


def test_an_abandoned_step_can_not_be_asked_for():
    choice = choose([[offer(3), offer(9), offer(4, later(2, 3))]], step=9)
    assert not choice.candidates
    assert "superseded" in choice.rejected[9, FIRST]


def test_nothing_offered_is_nothing_chosen():
    for offers in ([], [[]], [[], []]):
        choice = choose(offers)
        assert not choice.candidates and not choice.rejected


def test_a_rank_that_sees_nothing_rejects_everything():
    choice = choose([[offer(1)], [], []])
    assert not choice.candidates
    assert "ranks 1, 2 of 3" in choice.rejected[1, FIRST]


incarnations = st.builds(
    lambda generation, name, parent: Incarnation(generation, name * 16, "f" * 16 if parent else "", parent),
    st.integers(1, 4),
    st.sampled_from("ab"),
    st.integers(0, 5),
)
offers = st.builds(
    Offer,
    st.integers(0, 7),
    incarnations,
    st.just(2),
    st.sampled_from([(), ("memory",), ("storage",), ("memory", "storage")]),
)


@given(st.lists(st.lists(offers, max_size=8), max_size=4), st.none() | st.integers(0, 7))
def test_the_choice_is_that_of_a_brute_force_search(ranks, step):
    """Every checkpoint is tried by the words of the promise: read by all, of one incarnation, not left behind."""
    everything = [o for rank in ranks for o in rank]

    def stands(step: int, incarnation: Incarnation) -> bool:
        others = [o.incarnation for o in everything if o.incarnation.generation > incarnation.generation]
        return all(step <= other.parent_step for other in others)

    def read_by_all(step: int, incarnation: Incarnation) -> bool:
        return all(any(o.step == step and o.incarnation == incarnation and o.places for o in rank) for rank in ranks)

    keys = {(o.step, o.incarnation) for o in everything if step in (None, o.step)}
    expected = {key for key in keys if stands(*key) and read_by_all(*key)}

    choice = choose(ranks, step)
    assert set(choice.candidates) == expected and len(choice.candidates) == len(expected)
    assert choice.rejected.keys() == keys - expected and all(choice.rejected.values())
    ordered = [(s, i.generation) for s, i in choice.candidates]
    assert ordered == sorted(ordered, reverse=True)


@given(st.permutations([offer(1), offer(2), offer(3, later(2, 2)), offer(9)]))
def test_the_order_of_offers_does_not_matter(shuffled):
    assert choose([shuffled]).candidates == [(3, later(2, 2)), (2, FIRST), (1, FIRST)]
