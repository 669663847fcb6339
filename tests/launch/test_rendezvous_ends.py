"""The end of a job of several nodes: whose ranks have ended well, and who waits for whom, by a made-up clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rekindle.launch.rendezvous.roster import SMALLER_SIDE_WAITS
from rekindle.launch.rendezvous.wire import Address
from tests.launch.simulated_launchers import Launcher, Network
from tests.launch.test_rendezvous import begun, hosts, job, part


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


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("goes", GOES)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_whose_ranks_had_ended_well_is_not_missed(
    lost: int, goes: Callable[[Network, Launcher], None], least: int
) -> None:
    """No spare takes its place, and the others don't start again without it, also if it led."""
    network = Network()
    made = job(network, least=least)
    left = made[1 - lost]
    made[lost].end_well()
    network.run(1.0)
    goes(network, made[lost])
    network.run(20.0)
    assert part(made) == [left] and len(left.rounds) == 1 and not misses(left)
    left.end_well()
    network.run_until(lambda: are_done([left])[0])
    assert len(left.rounds) == 1


def test_who_is_told_that_the_job_is_done_over_a_connection_that_is_gone_hears_it_all_the_same() -> None:
    """As by a launcher that led, was stopped until others had given it up, and has just gone on."""
    network = Network()
    made = job(network, "ab")
    made[1].end_well()
    network.run(1.0)
    network.cut("a")
    network.run(1.0)
    made[0].end_well()
    made[0].finish()
    network.run(4.0)
    assert not are_done(made)[1] and made[0].node.has_members(network.now)
    network.cut()
    network.run_until(lambda: are_done(made)[1])


@pytest.mark.parametrize("seconds", [2.0, 6.0])
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_launcher_that_was_stopped_while_others_ended_hears_that_the_job_is_done(
    stopped: int, seconds: float
) -> None:
    """One that leads, and has heard that all is done, stays for it."""
    network = Network()
    made = job(network, "ab")
    made[stopped].end_well()
    network.run(1.0)
    network.cut(made[stopped].host)
    other = made[1 - stopped]
    network.run(seconds)
    other.end_well()
    network.run(0.5)
    if are_done([other])[0]:
        other.finish()
        assert other.node.has_members(network.now)
    network.cut()
    network.run_until(lambda: are_done(made) == [True, True])


def test_a_spare_that_follows_a_node_whose_ranks_had_ended_well_has_to_end_well_itself() -> None:
    network = Network()
    made = job(network)
    made[1].end_well()
    network.run(1.0)
    network.kill(made[1])
    made[0].fail()
    network.run_until(lambda: hosts(made) == "ac")
    made[0].end_well()
    network.run(5.0)
    assert not any(are_done(made))


def test_who_has_asked_to_start_again_has_not_ended_well() -> None:
    """It did so for a node that has come. The others' ranks end well before they hear of that."""
    roster = begun("a", "b", "c")
    roster.done("a" * 16, roster.round)
    roster.want("a" * 16, Address("a", 1001), roster.round, 1.0)
    roster.done("b" * 16, roster.round)
    roster.done("c" * 16, roster.round)
    roster.tick(1.0)
    assert not any(news.done for news in roster.news(1.0).values())


def test_one_that_has_come_back_keeps_nobody_at_the_end() -> None:
    network = Network()
    made = job(network, "ab")
    network.sever(made[1])
    network.run(3.0)
    for each in made:
        each.end_well()
    network.run_until(lambda: are_done(made) == [True, True])
    for each in made:
        each.finish()
    network.kill(made[1])
    network.run(0.5)
    assert not made[0].node.has_members(network.now)


def test_no_round_is_made_of_a_job_that_is_done() -> None:
    """All have ended well, and were told before that they start again for a node that has come: they ask too late."""
    roster = begun("a", "b", "c")
    before = roster.round
    for name in "abc":
        roster.done(name * 16, before)
    roster.tick(1.0)
    for name in "abc":
        roster.want(name * 16, Address(name, 1001), before, 1.0)
    roster.tick(60.0)
    assert roster.round == before and all(news.done for news in roster.news(60.0).values())


@pytest.mark.parametrize("lost", [0, 1])
def test_a_short_silence_restarts_nobody_though_the_job_may_shrink(lost: int) -> None:
    network = Network()
    made = job(network, "ab", least=1)
    made[1 - lost].end_well()
    network.run(1.0)
    network.cut("a")
    network.run(15.0)
    network.cut()
    network.run(15.0)
    assert [len(x.rounds) for x in made] == [1, 1]
    made[lost].end_well()
    network.run_until(lambda: are_done(made) == [True, True])


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


# -- many faults -------------------------------------------------------------------------------------------------------


def befall(network: Network, launchers: list[Launcher], least: int, most: int) -> None:
    """Lets something happen to one launcher, or to some. As many as the job needs stay alive."""
    chance = network.chance
    alive = [x for x in launchers if x.alive]
    victim = chance.choice(alive)
    kind = chance.choice(("ends", "ends", "fails", "goes", "goes silently", "cut", "severed", "new"))
    if kind == "ends":
        victim.end_well()
    elif kind == "fails" and victim.rounds and victim.rounds[-1].number not in victim.well:
        victim.fail()
    elif kind.startswith("goes") and len(alive) > least:
        (network.kill if kind == "goes" else network.lose_power)(victim)
    elif kind == "cut" and len(alive) > 1:
        network.run(3.0)  # one that is told of a round on one side may be part of another one on the other side
        network.cut(*chance.sample([x.host for x in alive], chance.randint(1, len(alive) - 1)))
        network.run(chance.uniform(0.1, 12.0))
        network.cut()
    elif kind == "severed":
        network.sever(victim)
    elif kind == "new" and len(alive) < most + 3:
        launchers.append(network.add(f"x{len(launchers)}", least=least, most=most, at="a,b"))


def check_ends(launchers: list[Launcher]) -> None:
    """None has heard that a job is done of which not all ranks have ended well, in one and the same round."""
    for launcher in launchers:
        news = launcher.node.news
        if news is not None and news.done:
            places = {r.place for x in launchers for r in x.rounds if r.number == news.round and r.number in x.well}
            assert places == set(range(news.world)), launcher.host


def end_after_faults(seed: int) -> bool:
    """Returns True if the job was done in the end. It may have lost all that knew of its newest round."""
    network = Network(seed)
    chance = network.chance
    network.slowest = chance.choice((0.001, 0.02, 0.3))
    most = chance.randint(1, 4)
    least = chance.choice((most, max(1, most - 2)))
    names = "abcdefgh"[: most + chance.randint(0, 2)]
    launchers = job(network, names, at="a,b", least=least, most=most)
    for _ in range(chance.randint(1, 8)):
        befall(network, launchers, least, most)
        network.run(chance.choice((0.0, chance.uniform(0.0, 0.5), chance.uniform(0.0, 6.0))))
        check_ends(launchers)
    for _ in range(30):
        network.run(SMALLER_SIDE_WAITS / 3)
        check_ends(launchers)
        for launcher in part(launchers):
            launcher.end_well()
    newest = max(x.rounds[-1].number for x in launchers if x.rounds)
    there = [x for x in launchers if x.alive and x.rounds and x.rounds[-1].number == newest]
    assert all(are_done(there)) or all(map(misses, there))
    return any(are_done(there))


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(1000, 1500), marks=pytest.mark.campaign(seconds=60))])
def test_a_job_is_done_only_when_it_is_and_then_all_hear_of_it(seeds: range) -> None:
    done = 0
    for seed in seeds:
        try:
            done += end_after_faults(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
    assert done > len(seeds) / 2
