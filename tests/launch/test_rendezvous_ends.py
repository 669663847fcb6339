"""The end of a job of several nodes: whose ranks have ended well, and who waits for whom, by a made-up clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.launch.simulated_launchers import Launcher, Network
from tests.launch.test_rendezvous import hosts, job, part


def are_done(launchers: list[Launcher]) -> list[bool]:
    """Whether each has heard that the ranks of all nodes have ended well."""
    return [x.node.news is not None and x.node.news.done for x in launchers]


def misses(launcher: Launcher) -> bool:
    return launcher.node.news is not None and launcher.node.news.missing


def test_a_job_is_done_when_the_ranks_of_all_nodes_have_ended_well() -> None:
    network = Network()
    made = job(network)
    made[1].end_well()
    network.run(60.0)
    assert are_done(made) == [False] * 3 and hosts(made) == "ab" and not misses(made[1])
    made[0].end_well()
    assert network.run_until(lambda: are_done(made)[:2] == [True, True]) < 0.1
    network.run(10.0)
    assert [len(x.rounds) for x in made] == [1, 1, 0]


def test_ranks_that_have_ended_well_are_started_again_with_others_that_fail() -> None:
    network = Network()
    made = job(network)
    made[0].end_well()
    network.run(5.0)
    made[1].fail()
    network.run_until(lambda: [len(x.rounds) for x in made] == [2, 2, 0])
    made[1].end_well()
    network.run(5.0)
    assert are_done(made) == [False] * 3, "what a node's former ranks did counts no more"
    made[0].end_well()
    network.run_until(lambda: are_done(made)[:2] == [True, True])


GOES: list[Callable[[Network, Launcher], None]] = [Network.kill, Network.lose_power]


@pytest.mark.parametrize("goes", GOES)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_spare_takes_the_place_of_a_node_whose_ranks_had_not_ended_well(
    lost: int, goes: Callable[[Network, Launcher], None]
) -> None:
    """Also that of the launcher that leads, and has all that the others need to meet."""
    network = Network()
    made = job(network)
    made[1 - lost].end_well()
    network.run(1.0)
    goes(network, made[lost])
    network.run_until(lambda: hosts(made) == ("cb" if lost == 0 else "ac"))
    assert not any(are_done(made))


@pytest.mark.parametrize("goes", GOES)
def test_a_node_whose_ranks_had_ended_well_is_not_missed(goes: Callable[[Network, Launcher], None]) -> None:
    network = Network()
    made = job(network)
    made[1].end_well()
    network.run(1.0)
    goes(network, made[1])
    network.run(20.0)
    assert hosts(made) == "a" and len(made[0].rounds) == 1 and not misses(made[0]), "no spare takes its place"
    made[0].end_well()
    network.run_until(lambda: are_done(made)[0])


@pytest.mark.parametrize("lost", [0, 1])
def test_without_a_spare_the_others_know_that_a_node_is_missing(lost: int) -> None:
    network = Network()
    made = job(network, "ab", at="a,b")
    left = made[1 - lost]
    left.end_well()
    network.kill(made[lost])
    network.run_until(lambda: misses(left))
    network.run(60.0)
    assert misses(left) and not are_done([left])[0] and len(left.rounds) == 1
    network.add("c", at="a,b")
    network.run_until(lambda: len(part(network.launchers)) == 2)
    assert not misses(left)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_job_that_may_shrink_goes_on_without_a_node_whose_ranks_had_not_ended_well(lost: int) -> None:
    network = Network()
    made = job(network, "ab", least=1)
    left = made[1 - lost]
    left.end_well()
    network.run(1.0)
    network.kill(made[lost])
    network.run_until(lambda: len(left.rounds) == 2)
    left.end_well()
    network.run_until(lambda: are_done([left])[0])


def test_one_that_comes_back_after_a_broken_connection_has_its_word_kept() -> None:
    network = Network()
    made = job(network, "ab")
    made[1].end_well()
    network.run(1.0)
    network.sever(made[1])
    network.run(5.0)
    made[0].end_well()
    network.run_until(lambda: are_done(made) == [True, True])


def test_one_whose_ranks_end_well_while_nobody_leads_tells_the_next_one() -> None:
    network = Network()
    made = job(network, "abc", least=3, most=3, at="a,b")
    network.kill(made[0])
    made[1].end_well()
    made[2].end_well()
    network.run(5.0)
    assert misses(made[1]) and not any(are_done(made))
    network.add("d", least=3, most=3, at="a,b")
    network.run_until(lambda: len(part(network.launchers)) == 3)
